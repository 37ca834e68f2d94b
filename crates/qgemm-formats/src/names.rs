//! Tensor names: suggestions for unknown names, and safe printing of
//! names from untrusted files.

/// Maximum length of compared names, which bounds the time for a hostile file.
const MAX_LENGTH: usize = 256;

/// Escapes control characters and bidirectional controls in `text`, so that no
/// name can act on a terminal.
///
/// ```
/// use qgemm_formats::model::printable;
/// assert_eq!(printable("blk.0.ffn_up.weight"), "blk.0.ffn_up.weight");
/// assert_eq!(printable("a\x1b[2Jb\n"), "a\\u{1b}[2Jb\\n");
/// ```
pub fn printable(text: &str) -> String {
    let acts = |c: char| {
        c.is_control() || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{200e}' | '\u{200f}')
    };
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if acts(c) { shown.extend(c.escape_default()) } else { shown.push(c) }
    }
    shown
}

/// Name most similar to `wanted`: one that contains it, else one within an edit
/// distance of a third of its length.
pub(crate) fn nearest<'a>(wanted: &str, names: impl Iterator<Item = &'a str> + Clone) -> Option<String> {
    if wanted.is_empty() || wanted.len() > MAX_LENGTH {
        return None;
    }
    let containing = names.clone().filter(|name| name.contains(wanted)).min_by_key(|name| name.len());
    if let Some(name) = containing {
        return Some(name.to_owned());
    }
    let close = names.filter(|name| name.len() <= MAX_LENGTH).map(|name| (distance(wanted, name), name));
    let (distance, name) = close.min()?;
    (distance <= wanted.len() / 3).then(|| name.to_owned())
}

/// Levenshtein distance in bytes.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_was_meant() {
        let names = ["blk.0.attn_q.weight", "blk.0.attn_k.weight", "output.weight"];
        let near = |wanted| nearest(wanted, names.iter().copied());
        assert_eq!(near("blk.0.atn_q.weight").as_deref(), Some("blk.0.attn_q.weight"));
        assert_eq!(near("attn_k").as_deref(), Some("blk.0.attn_k.weight"));
        assert_eq!(near("nothing like it at all"), None);
        assert_eq!(distance("kitten", "sitting"), 3);
    }
}
