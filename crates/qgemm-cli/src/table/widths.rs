//! Widths of a text table's columns. In a terminal, columns of words
//! shrink until lines fit; elsewhere no cell is elided.

use console::{Alignment, Term, measure_text_width, pad_str, truncate_str};
use qgemm_api::printable;

use super::column::Column;

/// Least width of a column of words that shrinks.
const LEAST: usize = 6;
/// Width up to which the first column, which names the row, is kept.
const NAME: usize = 16;
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
            let spare = |&i: &usize| widths[i].saturating_sub(if i == 0 { NAME } else { LEAST });
            let widest = (0..widths.len()).filter(|&i| !columns[i].right).max_by_key(spare);
            match widest.filter(|i| spare(i) > 0) {
                Some(i) => widths[i] -= 1,
                None => break,
            }
        }
        Self { widths, terminal }
    }

    /// A line of cells, aligned. Control characters in names from files
    /// are escaped.
    pub fn line(&self, columns: &[Column], cells: Vec<String>) -> String {
        let cells: Vec<String> = cells.iter().map(|cell| printable(cell)).collect();
        let whole = padded(&cells, columns, &columns.iter().map(|column| column.width).collect::<Vec<_>>());
        match self.terminal {
            Some(most) if measure_text_width(&whole) > most => self.elided(columns, &cells, most),
            _ => whole,
        }
    }

    /// A line whose cells of words are cut to the columns.
    fn elided(&self, columns: &[Column], cells: &[String], most: usize) -> String {
        let mut cut = cells.to_vec();
        let count = cells.len().min(columns.len());
        for i in 0..count {
            let used = self.widths[..i].iter().map(|width| width + GAP).sum::<usize>();
            let room = if i + 1 == count { most.saturating_sub(used) } else { self.widths[i] };
            if !columns[i].right {
                cut[i] = if room == 0 { String::new() } else { truncate_str(&cut[i], room, "…").into_owned() };
            }
        }
        padded(&cut, columns, &self.widths)
    }
}

/// Cells padded to these widths.
fn padded(cells: &[String], columns: &[Column], widths: &[usize]) -> String {
    let cell = |((cell, column), width): ((&String, &Column), &usize)| {
        let side = if column.right { Alignment::Right } else { Alignment::Left };
        pad_str(cell, *width, side, None).into_owned()
    };
    let cells: Vec<String> = cells.iter().zip(columns).zip(widths).map(cell).collect();
    cells.join(&" ".repeat(GAP)).trim_end().to_owned()
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
        for terminal in [60, 80, 100, 120] {
            let line = Widths::within(&COLUMNS, Some(terminal)).line(&COLUMNS, cells());
            assert!(measure_text_width(&line) <= terminal, "{terminal}: {line}");
            assert!(line.contains("1234.56") && line.contains('…'), "{line}");
        }
    }

    #[test]
    fn lines_that_fit_are_whole_though_a_cell_is_longer_than_its_column() {
        let cells = ["n".repeat(40), "1".into(), "k".into(), "note".into()].to_vec();
        let line = Widths::within(&COLUMNS, Some(120)).line(&COLUMNS, cells.clone());
        assert!(cells.iter().all(|cell| line.contains(cell.as_str())), "{line}");
        let columns = [words("name", 10), numbers("a", 30), numbers("b", 30), words("note", 0)];
        let line =
            Widths::within(&columns, Some(60)).line(&columns, ["n", "1", "2", "note"].map(str::to_owned).to_vec());
        assert!(!line.contains("note") && line.contains('2'), "nothing is left for the note: {line}");
    }

    #[test]
    fn nothing_is_elided_elsewhere() {
        let line = Widths::within(&COLUMNS, None).line(&COLUMNS, cells());
        assert!(cells().iter().all(|cell| line.contains(cell.as_str())), "{line}");
        let first = Widths::within(&COLUMNS, None).line(&COLUMNS, vec!["cpu".into(), "why there is none".into()]);
        assert_eq!(first, format!("{:30}  why there is none", "cpu"));
    }
}
