//! Per-layer settings: AutoRound's `extra_config`, GPTQModel's `dynamic` and ModelOpt's
//! `quantized_layers`. Their keys are layer names or regular expressions. MLX has the
//! names of layers among the settings themselves.

use std::collections::HashMap;

use regex::bytes::{Regex, RegexBuilder};

use super::json::Json;

/// Maximum number of regular expressions, because each layer tries each of them.
const MOST_PATTERNS: usize = 4096;
/// Maximum memory of a compiled expression in bytes.
const PATTERN_MEMORY: usize = 1 << 20;
/// Characters that make a key a regular expression. Dots occur in every name.
const PATTERN_CHARACTERS: &[char] = &['*', '+', '?', '^', '$', '(', ')', '[', ']', '{', '}', '|', '\\'];

/// Per-layer settings of one source.
#[derive(Clone, Debug, Default)]
pub(super) struct Overrides {
    lists: Vec<List>,
    /// Settings of MLX layers.
    own: HashMap<String, Json>,
    /// Reason why they are invalid.
    refused: Option<String>,
}

/// One setting with an entry per layer or pattern.
#[derive(Clone, Debug)]
struct List {
    rules: Vec<Rule>,
    /// First rule of each layer with an exact name.
    named: HashMap<String, usize>,
    /// Rules with patterns, in file order.
    patterns: Vec<usize>,
    /// Whether exact names precede all patterns, not only later ones.
    names_first: bool,
}

#[derive(Clone, Debug)]
struct Rule {
    key: String,
    pattern: Option<Pattern>,
    values: Json,
}

#[derive(Clone, Debug)]
enum Pattern {
    Compiled(Regex),
    /// Reason for the refusal.
    Refused(String),
}

impl Overrides {
    /// Reads the overrides in `settings`.
    pub fn of(settings: &Json) -> Self {
        let lists = [
            // Patterns match anywhere in the name.
            ("extra_config", true, (|key, values| (key, "", values)) as fn(&str, Json) -> (&str, &str, Json)),
            // Patterns match from the start. `-:` marks layers without quantization.
            ("dynamic", false, |key, values| match key.strip_prefix("-:") {
                Some(key) => (key, "^", unquantized()),
                None => (key.strip_prefix("+:").unwrap_or(key), "^", values),
            }),
            ("quantized_layers", true, |key, values| (key, "", values)),
        ];
        let own = settings.entries().iter().filter_map(of_mlx).collect();
        let mut overrides = Self { own, ..Self::default() };
        for (setting, names_first, rule) in lists {
            match settings.get(setting) {
                Json::Object(entries) => overrides.lists.push(List::new(entries, names_first, rule)),
                Json::Null => {}
                other => overrides.refused = Some(format!("`{setting}` is {other}: expected an object")),
            }
        }
        overrides
    }

    /// Settings of the layer `name`, if it has its own.
    ///
    /// # Errors
    /// The reason: an invalid pattern, or invalid settings.
    pub fn find(&self, name: &str) -> Result<Option<&Json>, String> {
        if let Some(why) = &self.refused {
            return Err(why.clone());
        }
        for list in &self.lists {
            if let Some(values) = list.find(name)? {
                return Ok(Some(values));
            }
        }
        Ok(self.own.get(name))
    }
}

/// Settings of an MLX layer: an object, or `false` for a layer without quantization.
fn of_mlx((name, values): &(String, Json)) -> Option<(String, Json)> {
    let states = |key| !values.get(key).is_null();
    match values {
        Json::Bool(false) => Some((name.clone(), unquantized())),
        Json::Object(_) if states("bits") || states("group_size") => Some((name.clone(), values.clone())),
        _ => None,
    }
}

/// Settings of a layer without quantization.
fn unquantized() -> Json {
    Json::Object(vec![("bits".into(), Json::Integer(16))])
}

impl List {
    fn new(entries: &[(String, Json)], names_first: bool, rule: fn(&str, Json) -> (&str, &str, Json)) -> Self {
        let mut list = Self { rules: Vec::new(), named: HashMap::new(), patterns: Vec::new(), names_first };
        for (index, (key, values)) in entries.iter().enumerate() {
            let (name, anchor, values) = rule(key, values.clone());
            let pattern = match literal(name) {
                Some(name) => {
                    list.named.entry(name).or_insert(index);
                    None
                }
                None => {
                    list.patterns.push(index);
                    Some(match list.patterns.len() {
                        0..=MOST_PATTERNS => compile(anchor, name),
                        _ => Pattern::Refused(format!("exceeds the limit of {MOST_PATTERNS} patterns")),
                    })
                }
            };
            list.rules.push(Rule { key: key.clone(), pattern, values });
        }
        list
    }

    fn find(&self, name: &str) -> Result<Option<&Json>, String> {
        let named = self.named.get(name).copied();
        let first = named.filter(|_| self.names_first);
        let mut patterns = self.patterns.iter().copied().filter(|&index| named.is_none_or(|named| index < named));
        let rule = match first {
            Some(rule) => Some(rule),
            None => loop {
                let Some(index) = patterns.next() else { break named };
                match &self.rules[index] {
                    Rule { pattern: Some(Pattern::Compiled(pattern)), .. } if pattern.is_match(name.as_bytes()) => {
                        break Some(index);
                    }
                    Rule { pattern: Some(Pattern::Refused(why)), key, .. } => {
                        return Err(format!("the layer pattern `{key}` {why}"));
                    }
                    _ => {}
                }
            },
        };
        let Some(Rule { key, values, .. }) = rule.map(|rule| &self.rules[rule]) else { return Ok(None) };
        if !values.is_object() {
            return Err(format!("`{key}` is {values}: expected an object"));
        }
        Ok(Some(values))
    }
}

/// Exact name of a key, with escapes removed. `None` for a pattern.
fn literal(key: &str) -> Option<String> {
    let key = key.strip_prefix('^').unwrap_or(key);
    let key = key.strip_suffix('$').filter(|rest| !rest.ends_with('\\')).unwrap_or(key);
    let name = key.replace("\\.", ".").replace("\\-", "-");
    (!name.contains(PATTERN_CHARACTERS)).then_some(name)
}

/// Regular expression on layer names, with limits on memory and nesting.
pub(super) fn layer_regex(pattern: &str) -> Result<Regex, regex::Error> {
    RegexBuilder::new(pattern).unicode(false).size_limit(PATTERN_MEMORY).nest_limit(64).build()
}

fn compile(anchor: &str, pattern: &str) -> Pattern {
    let pattern = format!("{anchor}(?:{pattern})");
    match layer_regex(&pattern) {
        Ok(regex) => Pattern::Compiled(regex),
        Err(regex::Error::CompiledTooBig(_)) => Pattern::Refused("is too large".into()),
        Err(_) => Pattern::Refused("is no regular expression without look-around and references".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bits(settings: &str, name: &str) -> Result<Option<i64>, String> {
        let overrides = Overrides::of(&Json::parse(settings).expect("JSON"));
        overrides.find(name).map(|values| values.and_then(|values| values.get("bits").integer()))
    }

    #[test]
    fn the_first_rule_that_matches_counts() {
        let dynamic = r#"{"dynamic": {"-:.*\\.shared.*": {}, "+:.*\\.3\\..*(?:up|down).*": {"bits": 8}, "lm_head": {"bits": 2},
            ".*up_proj": {"bits": 3}, "^model\\.first$": {"bits": 5}}}"#;
        for (name, expected) in [
            ("model.layers.3.mlp.shared.up_proj", Some(16)),
            ("model.layers.3.mlp.up_proj", Some(8)),
            ("model.layers.13.mlp.up_proj", Some(3)),
            ("lm_head", Some(2)),
            ("model.lm_head", None),
            ("model.first", Some(5)),
            ("model.firstly", None),
        ] {
            assert_eq!(bits(dynamic, name), Ok(expected), "{name}");
        }
        // From the start of the name: `re.match`.
        assert_eq!(bits(r#"{"dynamic": {"mlp\\..*": {"bits": 8}}}"#, "model.mlp.up"), Ok(None));
    }

    #[test]
    fn extra_settings_prefer_full_names() {
        let extra = r#"{"extra_config": {".*mlp\\.gate.*": {"bits": 16}, "model.mlp.gate": {"bits": 8}, "attn(?!x)": {"bits": 2}}}"#;
        assert_eq!(bits(extra, "model.mlp.gate"), Ok(Some(8)));
        assert_eq!(bits(extra, "model.mlp.gate_proj"), Ok(Some(16)));
        // Anywhere in the name: `re.search`.
        assert_eq!(bits(r#"{"extra_config": {"mlp\\.[gu].*": {"bits": 8}}}"#, "model.mlp.up"), Ok(Some(8)));
        // An invalid pattern might match.
        let error = bits(extra, "model.attn").expect_err("no look-around");
        assert!(error.contains("attn(?!x)"), "{error}");
        assert_eq!(bits(r#"{"quantized_layers": {"lm_head": {"bits": 8}}}"#, "lm_head"), Ok(Some(8)));
        for settings in ["{}", r#"{"dynamic": null, "extra_config": {}}"#, r#"{"dynamic": {"a.*": 4}}"#] {
            assert_eq!(bits(settings, "lm_head"), Ok(None), "{settings}");
        }
        for settings in [r#"{"extra_config": 4}"#, r#"{"dynamic": [1]}"#, r#"{"dynamic": {"lm_head": 4}}"#] {
            assert!(bits(settings, "lm_head").is_err(), "{settings}");
        }
    }

    #[test]
    fn hostile_patterns_cost_little() {
        for pattern in ["(".repeat(100_000), "((a{1000}){1000}){1000}".into(), "(a*)*b".into(), "[".into()] {
            let settings = format!(r#"{{"extra_config": {{"{pattern}": {{"bits": 8}}}}}}"#);
            assert_ne!(bits(&settings, &"a".repeat(10_000)), Ok(Some(8)));
        }
        let many: Vec<String> = (0..MOST_PATTERNS + 1).map(|i| format!(r#""x{i}.*": {{}}"#)).collect();
        assert!(bits(&format!(r#"{{"dynamic": {{{}}}}}"#, many.join(", ")), "name").is_err());
    }
}
