//! Widths of a text table's columns. In a terminal, columns of words
//! shrink until lines fit; elsewhere no cell is elided.

use console::{Alignment, Term, measure_text_width, pad_str, truncate_str};
use qgemm_api::printable;

use super::column::Column;

/// Least width of a column of words that shrinks.
const LEAST: usize = 10;
/// Characters between columns.
const GAP: usize = 2;

/// Widths of the columns of a table.
pub struct Widths {
    widths: Vec<usize>,
    /// Columns of the terminal; `None` for files and pipes.
    terminal: Option<usize>,
}

impl Widths {
    /// For standard output.
    pub fn of_output(columns: &[Column]) -> Self {
        let term = Term::stdout();
        let terminal = term.is_term().then(|| term.size_checked()).flatten();
        Self::within(columns, terminal.map(|(_, columns)| usize::from(columns)))
    }

    /// For a terminal of so many columns.
    fn within(columns: &[Column], terminal: Option<usize>) -> Self {
        let mut widths: Vec<usize> = columns.iter().map(|column| column.width).collect();
        let Some(most) = terminal else { return Self { widths, terminal } };
        // The last column gets what is left, and should get something.
        let needed = |widths: &[usize]| widths.iter().map(|width| width + GAP).sum::<usize>() + LEAST;
        while needed(&widths) > most {
            let widest = (0..widths.len()).filter(|&i| !columns[i].right).max_by_key(|&i| widths[i]);
            match widest {
                Some(i) if widths[i] > LEAST => widths[i] -= 1,
                _ => break,
            }
        }
        Self { widths, terminal }
    }

    /// A line of cells, aligned. Control characters in names from files
    /// are escaped.
    pub fn line(&self, columns: &[Column], cells: Vec<String>) -> String {
        let mut line = String::new();
        let last = cells.len().min(columns.len()).saturating_sub(1);
        for (i, (cell, column)) in cells.iter().zip(columns).enumerate() {
            let mut cell = printable(cell);
            let used = measure_text_width(&line);
            if let Some(most) = self.terminal {
                let room = if i == last { most.saturating_sub(used) } else { self.widths[i] };
                if !column.right && room > 0 {
                    cell = truncate_str(&cell, room, "…").into_owned();
                }
            }
            let side = if column.right { Alignment::Right } else { Alignment::Left };
            line += &pad_str(&cell, self.widths[i], side, None);
            if i < last {
                line += &" ".repeat(GAP);
            }
        }
        line.truncate(line.trim_end().len());
        line
    }
}

#[cfg(test)]
mod tests {
    use super::super::column::{numbers, words};
    use super::*;

    const COLUMNS: [Column; 4] = [words("name", 30), numbers("time", 8), words("kernel", 40), words("note", 0)];

    fn cells() -> Vec<String> {
        vec!["n".repeat(30), "1234.56".into(), "k".repeat(60), "a note that is long enough to be cut".into()]
    }

    #[test]
    fn lines_fit_a_terminal_and_keep_their_numbers() {
        for terminal in [60, 80, 100, 140] {
            let line = Widths::within(&COLUMNS, Some(terminal)).line(&COLUMNS, cells());
            assert!(measure_text_width(&line) <= terminal, "{terminal}: {line}");
            assert!(line.contains("1234.56") && line.contains('…'), "{line}");
        }
    }

    #[test]
    fn nothing_is_elided_elsewhere() {
        let line = Widths::within(&COLUMNS, None).line(&COLUMNS, cells());
        assert!(cells().iter().all(|cell| line.contains(cell.as_str())), "{line}");
        let first = Widths::within(&COLUMNS, None).line(&COLUMNS, vec!["cpu".into(), "why there is none".into()]);
        assert_eq!(first, format!("{:30}  why there is none", "cpu"));
    }
}
