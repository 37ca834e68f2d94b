//! Templates in `shaders/`: repeated lines beyond
//! plain WGSL, so that inner loops do not depend
//! on a driver's unrolling.
//!
//! ```text
//! #for t TILE_M        the lines up to `#end`, TILE_M times; `$t` in them is 0, 1, …, and `$t+1` the next
//! #end
//! #number(s, q, i)     the number of value i of quad q of span s, from words `w.low0`, `w.high0`, …
//! #quad(s, q)          all four of them as bytes
//! ```

use crate::weight_code::Place;

/// Expands all repetitions in `text`. Counts may name `constants`,
/// and `place` locates a value's code.
pub(crate) fn expand(text: &str, constants: &[(&str, u32)], place: impl Fn(u32, u32, u32) -> Place) -> String {
    let mut out = String::new();
    repeat(&mut text.lines(), constants, &mut out);
    ["number", "quad"].into_iter().fold(out, |text, function| calls(&text, function, &place))
}

/// Copies lines up to the `#end` of the enclosing
/// repetition, or to the end.
fn repeat<'a>(lines: &mut impl Iterator<Item = &'a str>, constants: &[(&str, u32)], out: &mut String) {
    while let Some(line) = lines.next() {
        let mut words = line.split_whitespace();
        match (words.next(), words.next(), words.next()) {
            (Some("#end"), ..) => return,
            (Some("#for"), Some(name), Some(count)) => {
                let mut body = String::new();
                repeat(lines, constants, &mut body);
                let variable = format!("${name}");
                let next = format!("{variable}+1");
                for value in 0..count_of(count, constants) {
                    let body = body.replace(&next, &(value + 1).to_string());
                    out.push_str(&body.replace(&variable, &value.to_string()));
                }
            }
            _ => {
                out.push_str(line);
                out.push('\n');
            }
        }
    }
}

fn count_of(count: &str, constants: &[(&str, u32)]) -> u32 {
    let named = constants.iter().find(|(name, _)| *name == count).map(|&(_, value)| value);
    // The sources are ours, and the tests
    // expand all of them.
    named.or_else(|| count.parse().ok()).unwrap_or_else(|| unreachable!("`{count}` is no constant"))
}

/// Turns every `#function(s, q, i)` into calls of `function`.
/// Without `i` it refers to the quad's first value.
fn calls(text: &str, function: &str, place: impl Fn(u32, u32, u32) -> Place) -> String {
    let marker = format!("#{function}(");
    let mut parts = text.split(marker.as_str());
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (arguments, rest) = part.split_once(')').unwrap_or((part, ""));
        let mut arguments = arguments.split(',').map(|argument| argument.trim().parse().unwrap_or(0));
        let mut next = || arguments.next().unwrap_or(0);
        let Place { low_word, low_bit, high } = place(next(), next(), next());
        let (high, high_bit) = match high {
            Some((word, bit)) => (format!("w.high{word}"), bit),
            None => ("vec4<u32>()".to_owned(), 0),
        };
        out.push_str(&format!("{function}(w.low{low_word}, {high}, {low_bit}u, {high_bit}u)"));
        out.push_str(rest);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repetitions_nest_and_numbers_name_their_words() {
        let text = "a\n  #for i TWO\n#for j 2\nx$i_$j+1 = #number($i, $j, 3);\n#end\n#end\n\
            b#quad(1, 2)\n#for k NONE\nc\n#end\n";
        let place = |s: u32, q: u32, i: u32| Place {
            low_word: s as usize,
            low_bit: q as usize,
            high: (s > 0).then_some((7, i as usize)),
        };
        let expected = "a\n\
            x0_1 = number(w.low0, vec4<u32>(), 0u, 0u);\n\
            x0_2 = number(w.low0, vec4<u32>(), 1u, 0u);\n\
            x1_1 = number(w.low1, w.high7, 0u, 3u);\n\
            x1_2 = number(w.low1, w.high7, 1u, 3u);\nbquad(w.low1, w.high7, 2u, 0u)\n";
        assert_eq!(expand(text, &[("TWO", 2), ("NONE", 0)], place), expected);
    }
}
