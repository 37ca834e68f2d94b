//! Tables: text with aligned columns, printed row by row, or one
//! JSON array.

use qgemm_api::printable;
use serde::Serialize;

use crate::out;
use crate::progress::Progress;

/// A column of text.
pub struct Column {
    /// Its title.
    pub title: &'static str,
    /// Width in characters; longer cells shift the rest of their
    /// line.
    pub width: usize,
    /// Numbers are aligned to the right.
    pub right: bool,
}

/// A column of words.
pub const fn words(title: &'static str, width: usize) -> Column {
    Column { title, width, right: false }
}

/// A column of numbers.
pub const fn numbers(title: &'static str, width: usize) -> Column {
    Column { title, width, right: true }
}

/// A row: serialized as JSON, and one cell per column.
pub trait Row: Serialize {
    /// The columns.
    const COLUMNS: &'static [Column];

    /// The text of every column.
    fn cells(&self) -> Vec<String>;
}

/// A table in progress.
pub struct Table<R> {
    json: bool,
    started: bool,
    rows: Vec<R>,
}

impl<R: Row> Table<R> {
    /// An empty table.
    pub fn new(json: bool) -> Self {
        Self { json, started: false, rows: Vec::new() }
    }

    /// Adds a row and, without JSON, prints it.
    ///
    /// # Errors
    /// When standard output is closed or full.
    pub fn push(&mut self, row: R, progress: &Progress) -> anyhow::Result<()> {
        if !self.json {
            let title = || line::<R>(R::COLUMNS.iter().map(|c| c.title.to_owned()).collect());
            if !self.started {
                progress.print(&title())?;
                self.started = true;
            }
            progress.print(&line::<R>(row.cells()))?;
        }
        self.rows.push(row);
        Ok(())
    }

    /// The rows, for JSON with further fields.
    pub fn into_rows(self) -> Vec<R> {
        self.rows
    }

    /// Ends the table and returns its rows.
    ///
    /// # Errors
    /// When a row cannot be serialised, or standard output is closed
    /// or full.
    pub fn finish(self) -> anyhow::Result<Vec<R>> {
        if self.json {
            out::json(&self.rows)?;
        }
        Ok(self.rows)
    }
}

/// Prints a whole table.
///
/// # Errors
/// When a row cannot be serialised, or standard output is closed
/// or full.
pub fn print<R: Row>(rows: Vec<R>, json: bool) -> anyhow::Result<()> {
    let mut table = Table::new(json);
    for row in rows {
        table.push(row, &Progress::none())?;
    }
    table.finish().map(|_| ())
}

/// A row's cells, aligned. Control characters in names from files
/// are escaped.
fn line<R: Row>(cells: Vec<String>) -> String {
    let cells: Vec<String> = cells.iter().map(|cell| printable(cell)).collect();
    let padded = cells.iter().zip(R::COLUMNS).map(|(cell, column)| match column.right {
        true => format!("{cell:>width$}", width = column.width),
        false => format!("{cell:<width$}", width = column.width),
    });
    padded.collect::<Vec<_>>().join("  ").trim_end().to_owned()
}

/// Bytes with a short unit.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 4] = ["B", "KiB", "MiB", "GiB"];
    let power = if count == 0 { 0 } else { (count.ilog2() as usize / 10).min(UNITS.len() - 1) };
    match power {
        0 => format!("{count} B"),
        _ => format!("{:.1} {}", count as f64 / (1u64 << (10 * power)) as f64, UNITS[power]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_short() {
        let counts = [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 19, "1.5 MiB"), (1 << 44, "16384.0 GiB")];
        for (count, text) in counts {
            assert_eq!(bytes(count), text);
        }
    }
}
