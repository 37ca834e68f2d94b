//! Tables: text with aligned columns, printed row by row; JSON, CSV or
//! Markdown, printed at the end.

mod column;
mod csv;
mod widths;

use qgemm_api::printable;
use serde::Serialize;

use crate::out::{self, Printing};
use crate::progress::Progress;
pub use column::{Column, numbers, words};
use widths::Widths;

/// A row: serialized as JSON and CSV, and one cell per column.
pub trait Row: Serialize {
    /// The columns.
    const COLUMNS: &'static [Column];

    /// The text of every column.
    fn cells(&self) -> Vec<String>;
}

/// A table in progress.
pub struct Table<R> {
    printing: Printing,
    widths: Option<Widths>,
    rows: Vec<R>,
}

impl<R: Row> Table<R> {
    /// An empty table.
    pub fn new(printing: Printing) -> Self {
        Self { printing, widths: None, rows: Vec::new() }
    }

    /// Adds a row and prints it, if rows are printed one by one.
    ///
    /// # Errors
    /// When standard output is closed or full.
    pub fn push(&mut self, row: R, progress: &Progress) -> anyhow::Result<()> {
        if self.printing.is_text() {
            if self.widths.is_none() {
                let widths = Widths::of_output(R::COLUMNS);
                progress.print(&widths.line(R::COLUMNS, titles::<R>()))?;
                self.widths = Some(widths);
            }
            if let Some(widths) = &self.widths {
                progress.print(&widths.line(R::COLUMNS, row.cells()))?;
            }
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
        match self.printing {
            Printing::Text => {}
            Printing::Json => out::json(&self.rows)?,
            Printing::Csv => out::text(&csv::text(&self.rows)?)?,
            Printing::Markdown => out::text(&markdown(&self.rows))?,
        }
        Ok(self.rows)
    }
}

/// Prints a whole table.
///
/// # Errors
/// When a row cannot be serialised, or standard output is closed
/// or full.
pub fn print<R: Row>(rows: Vec<R>, printing: Printing) -> anyhow::Result<()> {
    let mut table = Table::new(printing);
    for row in rows {
        table.push(row, &Progress::none())?;
    }
    table.finish().map(|_| ())
}

fn titles<R: Row>() -> Vec<String> {
    R::COLUMNS.iter().map(|column| column.title.to_owned()).collect()
}

/// A Markdown table. Columns that are empty in every row are left out.
fn markdown<R: Row>(rows: &[R]) -> String {
    let rows: Vec<Vec<String>> = rows.iter().map(Row::cells).collect();
    let is_used = |column: usize| rows.iter().any(|row| row.get(column).is_some_and(|cell| !cell.is_empty()));
    let used: Vec<usize> = (0..R::COLUMNS.len()).filter(|&column| rows.is_empty() || is_used(column)).collect();
    let line = |cells: &[String]| {
        let cell = |&column: &usize| cells.get(column).map_or(String::new(), |cell| escaped(cell));
        format!("| {} |\n", used.iter().map(cell).collect::<Vec<_>>().join(" | "))
    };
    let rule = |&column: &usize| if R::COLUMNS[column].right { "--:" } else { "---" };
    let rule = format!("| {} |\n", used.iter().map(rule).collect::<Vec<_>>().join(" | "));
    line(&titles::<R>()) + &rule + &rows.iter().map(|row| line(row)).collect::<String>()
}

/// A cell of Markdown, in which names from files are text.
fn escaped(cell: &str) -> String {
    let mut text = String::new();
    for c in printable(cell).chars() {
        if matches!(c, '|' | '\\' | '`' | '*' | '_' | '[' | ']') {
            text.push('\\');
        }
        match c {
            '<' => text += "&lt;",
            '>' => text += "&gt;",
            '&' => text += "&amp;",
            c => text.push(c),
        }
    }
    text
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

    #[derive(Serialize)]
    struct Named {
        name: &'static str,
        time: f64,
    }

    impl Row for Named {
        const COLUMNS: &'static [Column] = &[words("name", 8), numbers("time", 6), words("", 0)];

        fn cells(&self) -> Vec<String> {
            vec![self.name.to_owned(), format!("{:.1}", self.time), String::new()]
        }
    }

    #[test]
    fn bytes_are_short() {
        let counts = [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 19, "1.5 MiB"), (1 << 44, "16384.0 GiB")];
        for (count, text) in counts {
            assert_eq!(bytes(count), text);
        }
    }

    #[test]
    fn markdown_has_no_empty_column_and_names_are_text() {
        let rows = [Named { name: "a|b_c", time: 1.25 }, Named { name: "<i>", time: 20.0 }];
        let text = markdown(&rows);
        assert_eq!(text, "| name | time |\n| --- | --: |\n| a\\|b\\_c | 1.2 |\n| &lt;i&gt; | 20.0 |\n");
    }
}
