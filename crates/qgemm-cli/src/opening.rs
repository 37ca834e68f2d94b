//! Options for opening a model.

use std::path::Path;

use qgemm_api::{Error, Model, ModelOptions, open_model, read_model};

/// Options of commands that read a model's tensors.
#[derive(clap::Args, Clone, Copy, Debug)]
pub struct Opening {
    /// Read the model's files into memory instead of mapping them, if
    /// others may write to or truncate them meanwhile.
    #[arg(long)]
    pub read: bool,
}

impl Opening {
    /// Opens the model at `path`.
    ///
    /// # Errors
    /// When it cannot be read or is not a model.
    pub fn open(self, path: &Path) -> Result<Model, Error> {
        if self.read { read_model(path, ModelOptions::default()) } else { open_model(path) }
    }
}
