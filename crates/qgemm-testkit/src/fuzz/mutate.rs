//! Mutations of JSON and of bytes. Each returns a description.

use rand::Rng;
use rand::rngs::StdRng;
use serde_json::{Map, Value};

use crate::random::pick;

/// Mutates a JSON document at one path. `words` are strings and
/// keys that its reader knows.
pub fn json(rng: &mut StdRng, document: &mut Value, words: &[&str]) -> String {
    let paths = paths(document);
    let path = paths[rng.random_range(0..paths.len())].clone();
    let donor = document.pointer(&paths[rng.random_range(0..paths.len())]).cloned().unwrap_or(Value::Null);
    let is_in_object =
        |path: &str| parent(path).is_some_and(|(of, _)| document.pointer(&of).is_some_and(Value::is_object));
    match rng.random_range(0..10) {
        0 if is_in_object(&path) => remove(document, &path),
        1 if is_in_object(&path) => rename(rng, document, &path, words),
        2 => replace(document, &path, donor, "a copy of another value"),
        3 => {
            let (value, how) = wrapped(rng, document.pointer(&path).cloned().unwrap_or(Value::Null));
            replace(document, &path, value, how)
        }
        4 => lengthen(rng, document, &path, donor),
        5 => {
            let value = any(rng, words);
            replace(document, &path, value, "any value")
        }
        // Usually a similar value, which readers must tell from the
        // original.
        _ => {
            let value = near(rng, document.pointer(&path).unwrap_or(&Value::Null), words);
            replace(document, &path, value, "another value")
        }
    }
}

/// JSON pointers of all values within `document`, or the root if
/// there are none.
fn paths(document: &Value) -> Vec<String> {
    fn walk(value: &Value, path: &str, into: &mut Vec<String>) {
        let mut child = |key: &str, value: &Value| {
            let path = format!("{path}/{}", key.replace('~', "~0").replace('/', "~1"));
            walk(value, &path, into);
            into.push(path);
        };
        match value {
            Value::Object(map) => map.iter().for_each(|(key, value)| child(key, value)),
            Value::Array(list) => list.iter().enumerate().for_each(|(i, value)| child(&i.to_string(), value)),
            _ => {}
        }
    }
    let mut found = Vec::new();
    walk(document, "", &mut found);
    if found.is_empty() { vec![String::new()] } else { found }
}

fn parent(path: &str) -> Option<(String, String)> {
    let (of, key) = path.rsplit_once('/')?;
    Some((of.to_owned(), key.replace("~1", "/").replace("~0", "~")))
}

fn object_of<'a>(document: &'a mut Value, path: &str) -> Option<(&'a mut Map<String, Value>, String)> {
    let (of, key) = parent(path)?;
    Some((document.pointer_mut(&of)?.as_object_mut()?, key))
}

fn replace(document: &mut Value, path: &str, value: Value, how: &str) -> String {
    let shown: String = value.to_string().chars().take(60).collect();
    let Some(place) = document.pointer_mut(path) else { return "nothing".into() };
    let before: String = place.to_string().chars().take(60).collect();
    *place = value;
    format!("{path}: {how}, {before} → {shown}")
}

fn remove(document: &mut Value, path: &str) -> String {
    if let Some((object, key)) = object_of(document, path) {
        object.remove(&key);
    }
    format!("{path}: removed")
}

fn rename(rng: &mut StdRng, document: &mut Value, path: &str, words: &[&str]) -> String {
    let typo = rng.random_ratio(1, 2);
    let Some((object, key)) = object_of(document, path) else { return "nothing".into() };
    let Some(value) = object.remove(&key) else { return "nothing".into() };
    let name = if typo || words.is_empty() { format!("{key}_") } else { pick(rng, words).to_owned() };
    let said = format!("{path}: renamed to {name}");
    object.insert(name, value);
    said
}

fn wrapped(rng: &mut StdRng, value: Value) -> (Value, &'static str) {
    match rng.random_range(0..3) {
        0 => (Value::Array(vec![value]), "in a list"),
        1 => (Value::Object([("x".to_owned(), value)].into_iter().collect()), "in an object"),
        _ => (Value::String(value.to_string()), "as a string"),
    }
}

fn lengthen(rng: &mut StdRng, document: &mut Value, path: &str, donor: Value) -> String {
    let at = rng.random_range(0..4usize);
    match document.pointer_mut(path) {
        Some(Value::Array(list)) if at == 0 => {
            list.pop();
            format!("{path}: one element fewer")
        }
        Some(Value::Array(list)) if at == 1 => {
            list.reverse();
            format!("{path}: reversed")
        }
        Some(Value::Array(list)) => {
            let element = list.first().cloned().unwrap_or(donor);
            list.push(element);
            format!("{path}: the first element again")
        }
        Some(Value::Object(map)) => {
            map.insert("more".into(), donor);
            format!("{path}: one key more")
        }
        _ => replace(document, path, Value::Null, "nothing"),
    }
}

/// Any value.
fn any(rng: &mut StdRng, words: &[&str]) -> Value {
    match rng.random_range(0..8) {
        0 => Value::Null,
        1 => Value::Bool(rng.random()),
        2 => Value::Array(Vec::new()),
        3 => Value::Object(Map::new()),
        4 if !words.is_empty() => pick(rng, words).into(),
        5 => String::new().into(),
        _ => number(rng, rng.clone().random_range(-3..300)),
    }
}

/// A value similar to `value`.
fn near(rng: &mut StdRng, value: &Value, words: &[&str]) -> Value {
    match value {
        Value::Bool(flag) => (!flag).into(),
        Value::Number(old) => match old.as_i64() {
            Some(old) => number(rng, old),
            None => scaled(rng, old.as_f64().unwrap_or(0.0)),
        },
        Value::String(text) => string(rng, text, words),
        _ => any(rng, words),
    }
}

fn number(rng: &mut StdRng, old: i64) -> Value {
    let wide = [i64::MAX, i64::MIN, 1 << 31, 1 << 32, (1 << 53) + 1, -1, 0, 1];
    match rng.random_range(0..12) {
        0 => old.wrapping_add(1).into(),
        1 => old.wrapping_sub(1).into(),
        2 => old.wrapping_mul(2).into(),
        3 => (old / 2).into(),
        4 => old.wrapping_neg().into(),
        5 => u64::MAX.into(),
        6 => (old as f64 + 0.5).into(),
        7 => (old as f64).into(),
        8 => old.to_string().into(),
        9 => scaled(rng, old as f64),
        10 => (1i64 << rng.random_range(0..12)).into(),
        _ => pick(rng, &wide).into(),
    }
}

fn scaled(rng: &mut StdRng, old: f64) -> Value {
    let numbers = [1e308, -1e308, 5e-324, 0.0, -0.0, 1e-30, 1e30, -old, old * 2.0, old * 0.5, old + 1e-9];
    pick(rng, &numbers).into()
}

fn string(rng: &mut StdRng, text: &str, words: &[&str]) -> Value {
    match rng.random_range(0..8) {
        0 => text.to_uppercase().into(),
        1 => format!(" {text}").into(),
        2 => text.chars().rev().collect::<String>().into(),
        3 => format!("{text}{text}").into(),
        4 => digit(rng, text).into(),
        5 => text.chars().take(text.chars().count() / 2).collect::<String>().into(),
        _ if words.is_empty() => String::new().into(),
        _ => pick(rng, words).into(),
    }
}

/// `text` with a digit changed, if it has one.
fn digit(rng: &mut StdRng, text: &str) -> String {
    let digits: Vec<usize> = text.bytes().enumerate().filter(|(_, b)| b.is_ascii_digit()).map(|(i, _)| i).collect();
    let mut bytes = text.as_bytes().to_vec();
    if !digits.is_empty() {
        bytes[pick(rng, &digits)] = b'0' + rng.random_range(0..10u8);
    }
    String::from_utf8(bytes).unwrap_or_default()
}

/// Mutates the text of a JSON document as text.
pub fn text(rng: &mut StdRng, text: &mut String) -> String {
    let ends: Vec<usize> = text.char_indices().map(|(i, _)| i).collect();
    if ends.is_empty() {
        return "nothing".into();
    }
    let at = pick(rng, &ends);
    match rng.random_range(0..8) {
        0 => {
            text.truncate(at);
            format!("cut at {at}")
        }
        1 => {
            text.insert(0, '\u{feff}');
            "a byte-order mark".into()
        }
        2 => {
            let token = pick(rng, &["NaN", "Infinity", "-Infinity", "null", "1e999", "{}", "[", "\"", ",", "}"]);
            text.insert_str(at, token);
            format!("{token} at {at}")
        }
        3 => {
            let (open, depth) = (pick(rng, &["[", "{\"a\":"]), pick(rng, &[100, 200, 20_000]));
            text.insert_str(at, &open.repeat(depth));
            format!("{depth} times {open} at {at}")
        }
        4 => {
            let digits = "9".repeat(pick(rng, &[1, 20, 400, 40_000]));
            text.insert_str(at, &digits);
            format!("{} digits at {at}", digits.len())
        }
        5 => {
            text.push_str(&text.clone());
            "the text twice".into()
        }
        6 => {
            text.remove(at);
            format!("no character {at}")
        }
        _ => {
            *text = digit(rng, text);
            "a digit".into()
        }
    }
}

/// Mutates bytes at one offset, preferably among the first
/// `header` bytes.
pub fn bytes(rng: &mut StdRng, bytes: &mut Vec<u8>, header: usize) -> String {
    if bytes.is_empty() {
        bytes.push(rng.random());
        return "one byte".into();
    }
    let most = if rng.random_ratio(3, 4) { header.clamp(1, bytes.len()) } else { bytes.len() };
    let at = rng.random_range(0..most);
    match rng.random_range(0..8) {
        0..=2 => {
            bytes[at] ^= 1 << rng.random_range(0..8);
            format!("a bit of byte {at}")
        }
        3 => {
            bytes[at] = rng.random();
            format!("byte {at}")
        }
        4 => {
            let number = pick(rng, &[u64::MAX, 1 << 63, 1 << 32, 1 << 40, 0, 1, 255, bytes.len() as u64]);
            let end = (at + 8).min(bytes.len());
            bytes[at..end].copy_from_slice(&number.to_le_bytes()[..end - at]);
            format!("{number} at {at}")
        }
        5 => {
            bytes.truncate(at);
            format!("cut to {at}")
        }
        6 => {
            let count = rng.random_range(1..64).min(bytes.len() - at);
            let to = rng.random_range(0..=bytes.len() - count);
            bytes.copy_within(at..at + count, to);
            format!("{count} bytes of {at} at {to}")
        }
        _ => {
            let more = vec![rng.random(); rng.random_range(1..64)];
            bytes.splice(at..at, more.iter().copied());
            format!("{} bytes more at {at}", more.len())
        }
    }
}
