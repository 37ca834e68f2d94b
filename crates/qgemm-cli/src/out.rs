//! Standard output. If it is closed or full, printing returns an
//! error instead of a panic.

use std::fmt;
use std::io::{self, ErrorKind, Write};

use anyhow::{Context, ensure};
use qgemm_api::printable;
use serde::Serialize;

/// Form of what a command prints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Printing {
    /// Aligned tables and lines, for a terminal.
    Text,
    /// One JSON value.
    Json,
    /// Tables with a field a column, and numbers with all digits.
    Csv,
    /// Tables as people read them.
    Markdown,
}

/// Options of [`Printing`].
#[derive(clap::Args)]
#[command(next_help_heading = "Output")]
pub struct PrintingOptions {
    /// Print JSON instead of tables.
    #[arg(long, global = true)]
    json: bool,
    /// Print tables as CSV, with a column for each field of the JSON.
    #[arg(long, global = true)]
    csv: bool,
    /// Print tables in Markdown.
    #[arg(long, global = true)]
    markdown: bool,
}

impl PrintingOptions {
    /// The chosen form.
    ///
    /// # Errors
    /// When several are given.
    pub fn chosen(&self) -> anyhow::Result<Printing> {
        let given = [(self.json, Printing::Json), (self.csv, Printing::Csv), (self.markdown, Printing::Markdown)];
        let mut given = given.into_iter().filter_map(|(is_given, form)| is_given.then_some(form));
        let first = given.next().unwrap_or(Printing::Text);
        ensure!(given.next().is_none(), "expected one of --json, --csv and --markdown");
        Ok(first)
    }
}

impl Printing {
    /// Whether lines for people are printed beside tables.
    pub fn is_text(self) -> bool {
        self == Printing::Text
    }

    /// Whether JSON is printed, for a command without tables.
    ///
    /// # Errors
    /// With `--csv` and `--markdown`.
    pub fn json(self, command: &str) -> anyhow::Result<bool> {
        ensure!(
            matches!(self, Printing::Text | Printing::Json),
            "`qgemm {command}` prints no table: expected --json instead of --csv and --markdown"
        );
        Ok(self == Printing::Json)
    }
}

/// The reader of standard output has closed it, as `head` does.
#[derive(Debug)]
pub struct Closed;

impl fmt::Display for Closed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("standard output is closed")
    }
}

impl std::error::Error for Closed {}

/// Prints `line` with a newline.
///
/// # Errors
/// [`Closed`], or the system's error.
pub fn line(line: &str) -> anyhow::Result<()> {
    text(&format!("{line}\n"))
}

/// Prints `text`.
///
/// # Errors
/// As [`line()`].
pub fn text(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(Closed.into()),
        written => written.context("writing to standard output"),
    }
}

/// Prints `value` as JSON, without terminal control characters.
///
/// # Errors
/// As [`line()`], and when it cannot be serialised.
pub fn json(value: &impl Serialize) -> anyhow::Result<()> {
    line(&escaped(&serde_json::to_string_pretty(value)?))
}

/// Escapes characters that JSON allows unescaped in strings. They
/// never occur outside of strings.
fn escaped(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    for c in json.chars() {
        if c.is_ascii_graphic() || c == ' ' || c == '\n' || printable(c.encode_utf8(&mut [0; 4])).starts_with(c) {
            out.push(c);
        } else {
            out += &format!("\\u{:04x}", u32::from(c));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_stays_json_and_acts_on_nothing() {
        let value = serde_json::json!({ "name": "a\u{1b}[2J\u{9b}\u{202e}é\n\u{7f}", "n": [1, 2] });
        let text = escaped(&serde_json::to_string_pretty(&value).expect("JSON"));
        assert!(text.chars().all(|c| c == '\n' || printable(&c.to_string()) == c.to_string()), "{text}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).expect("JSON"), value);
        assert!(text.contains('é') && text.contains('\n'));
    }
}
