//! How a command opens the model that it is given.

use std::path::Path;

use qgemm_api::{Error, Model, ModelOptions, open_model, read_model};

/// Options of commands that read a model's tensors.
#[derive(clap::Args, Clone, Copy, Debug)]
pub struct Opening {
    /// Read the model's files into memory at once in place of mapping them: for files that others may write to or cut off meanwhile.
    #[arg(long)]
    read: bool,
}

impl Opening {
    /// Opens the model at `path`.
    ///
    /// # Errors
    /// When it cannot be read or is no model.
    pub fn open(self, path: &Path) -> Result<Model, Error> {
        if self.read { read_model(path, ModelOptions::default()) } else { open_model(path) }
    }
}
