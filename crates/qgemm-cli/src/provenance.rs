//! Origin of measurements: device, date, commit and command. Results
//! files state it, so that a report need not guess.

use std::sync::OnceLock;

use jiff::Timestamp;
use qgemm_api::{DeviceInfo, printable};
use serde::{Deserialize, Serialize};

/// Version of this program, with the commit of its sources in a Git
/// checkout: `0.1.0 (1a2b3c4d)`. `+` marks changed files.
pub const VERSION: &str = env!("QGEMM_VERSION");

/// How a row was measured. Older files lack the fields.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Provenance {
    /// The device's driver or kernel compiler; empty without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// Start of the command, in UTC: `2026-11-29T16:31:00Z`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub date: Option<String>,
    /// Version of the program, and its commit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// The command line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
}

impl Provenance {
    /// Provenance of this process's measurements on a device.
    pub fn now(info: &DeviceInfo) -> Self {
        static STARTED: OnceLock<String> = OnceLock::new();
        let date = STARTED.get_or_init(|| format!("{:.0}", Timestamp::now()));
        Self {
            driver: Some(info.driver.clone()),
            date: Some(date.clone()),
            commit: Some(VERSION.to_owned()),
            command: Some(command(std::env::args_os().skip(1).map(|argument| argument.to_string_lossy().into_owned()))),
        }
    }
}

/// A command line that a shell splits into these arguments.
fn command(arguments: impl Iterator<Item = String>) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_=.,:/+@%".contains(c);
    let quoted = arguments.map(|argument| match !argument.is_empty() && argument.chars().all(is_plain) {
        true => argument,
        false => format!("'{}'", printable(&argument).replace('\'', "'\\''")),
    });
    std::iter::once("qgemm".to_owned()).chain(quoted).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_line_can_be_pasted() {
        let arguments = ["bench", "--shape", "1x2x3", "a b'c", ""].map(str::to_owned);
        assert_eq!(command(arguments.into_iter()), "qgemm bench --shape 1x2x3 'a b'\\''c' ''");
    }

    #[test]
    fn files_without_provenance_are_read() {
        let old: Provenance = serde_json::from_str("{}").expect("no field is needed");
        assert_eq!(old, Provenance::default());
        assert_eq!(serde_json::to_string(&old).expect("JSON"), "{}");
    }
}
