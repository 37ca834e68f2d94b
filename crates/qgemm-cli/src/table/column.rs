//! Columns of a table.

/// A column of text.
pub struct Column {
    /// Its title.
    pub title: &'static str,
    /// Width in characters; longer cells shift the rest of their
    /// line. The last column has width 0.
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
