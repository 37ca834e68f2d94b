//! What the settings of a checkpoint state of single layers: which are left as they are, and which have scales.

use regex::bytes::Regex;

use super::json::Json;
use super::overrides::layer_regex;
use super::settings::Settings;

/// Settings that list modules without quantization, by their names in the configurations of their methods.
const UNQUANTIZED: [&str; 6] =
    ["ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers", "exclude", "llm_int8_skip_modules"];

/// The settings of a checkpoint, asked layer by layer.
pub(super) struct Stated<'a> {
    settings: &'a Settings,
    unquantized: Vec<Pattern>,
    promises: Vec<Promise>,
    groups: Vec<Group>,
}

/// A group of compressed-tensors' settings.
struct Group {
    name: String,
    /// Its modules.
    targets: Vec<Pattern>,
    /// Bits of a weight.
    bits: Option<u64>,
    /// Whether weights are floats.
    is_float: bool,
}

/// A statement that the FP8 weights of some modules have scales.
struct Promise {
    /// The statement, for errors.
    by: String,
    /// The modules; none for all.
    modules: Vec<Pattern>,
}

impl<'a> Stated<'a> {
    /// Looks through the settings once.
    pub fn of(settings: &'a Settings) -> Self {
        let lists = settings.places().flat_map(|place| UNQUANTIZED.iter().map(|list| place.get(list)));
        Self {
            settings,
            unquantized: lists.flat_map(patterns).collect(),
            promises: settings.places().flat_map(promises).collect(),
            groups: settings.places().flat_map(groups).collect(),
        }
    }

    /// What states that FP8 weights of `module` have scales.
    pub fn promises_scales(&self, module: &str) -> Option<&str> {
        let mut floats = self.groups.iter().filter(|group| group.is_float && group.bits == Some(8));
        let by_group = floats.find(|group| is_one_of(&group.targets, module)).map(|group| group.name.as_str());
        let by_promise = || self.promises.iter().find(|p| is_one_of(&p.modules, module)).map(|p| p.by.as_str());
        let by = by_group.or_else(by_promise)?;
        (!self.is_unquantized(module)).then_some(by)
    }

    /// Whether the settings leave `module` as it is.
    pub fn is_unquantized(&self, module: &str) -> bool {
        self.unquantized.iter().any(|pattern| pattern.matches(module))
    }

    /// The method, in lower case.
    pub fn method(&self) -> Option<String> {
        self.first("quant_method").word()
    }

    /// ModelOpt's name of the algorithm: of `module` where the settings have one for it, else of all.
    pub fn algorithm(&self, module: &str) -> Option<&'a str> {
        let own = self.first("quantized_layers").get(module).get("quant_algo").text();
        own.or_else(|| self.text("quant_algo"))
    }

    /// The setting `name`, where it is text.
    pub fn text(&self, name: &str) -> Option<&'a str> {
        self.first(name).text()
    }

    /// Whether some place has the setting `name`.
    pub fn has(&self, name: &str) -> bool {
        !self.first(name).is_null()
    }

    /// The setting `name`, of `module` where the settings have one for it, as MLX writes them.
    pub fn of_module(&self, module: &str, name: &str) -> &'a Json {
        let own = self.first(module).get(name);
        if own.is_null() { self.first(name) } else { own }
    }

    /// The setting `name` of the first place that has it.
    fn first(&self, name: &str) -> &'a Json {
        self.settings.places().map(|place| place.get(name)).find(|value| !value.is_null()).unwrap_or(&Json::Null)
    }

    /// Bits of the weights of `module` by its group in compressed-tensors' settings.
    pub fn group_bits(&self, module: &str) -> Option<u64> {
        let of_module = self.groups.iter().find(|group| is_one_of(&group.targets, module));
        of_module.or(self.groups.first().filter(|_| self.groups.len() == 1))?.bits
    }
}

/// Whether `module` is in a list, which of no modules is one of all.
fn is_one_of(list: &[Pattern], module: &str) -> bool {
    list.is_empty() || list.iter().any(|pattern| pattern.matches(module))
}

fn groups(place: &Json) -> Vec<Group> {
    let group = |(name, group): &(String, Json)| Group {
        name: format!("`{name}` of `config_groups`"),
        targets: patterns(group.get("targets")).collect(),
        bits: group.get("weights").get("num_bits").integer().and_then(|bits| u64::try_from(bits).ok()),
        is_float: group.get("weights").get("type").word().as_deref() == Some("float"),
    };
    place.get("config_groups").entries().iter().map(group).collect()
}

/// What one place promises.
fn promises(place: &Json) -> Vec<Promise> {
    let of_all = |by: String| Promise { by, modules: Vec::new() };
    let mut found = Vec::new();
    let block = place.get("weight_block_size");
    if !block.is_null() {
        found.push(of_all(format!("`weight_block_size` {block}")));
    }
    if !place.get("config_groups").is_null() {
        found.push(of_all("`config_groups`".into()));
    }
    let method = place.get("quant_method").word().unwrap_or_default();
    if ["fp8", "fbgemm_fp8", "quark", "compressed-tensors"].contains(&method.as_str()) {
        found.push(of_all(format!("`quant_method` {method}")));
    }
    if let Some(algorithm) = place.get("quant_algo").text() {
        match place.get("quantized_layers") {
            // A list of none is not one of all.
            Json::Object(layers) if layers.is_empty() => {}
            Json::Object(layers) => found.push(Promise {
                by: format!("`quantized_layers` of `quant_algo` {algorithm}"),
                modules: layers.iter().map(|(name, _)| Pattern::new(name)).collect(),
            }),
            _ => found.push(of_all(format!("`quant_algo` {algorithm}"))),
        }
    }
    found
}

/// The names in a list.
fn patterns(list: &Json) -> impl Iterator<Item = Pattern> {
    list.items().iter().filter_map(Json::text).map(Pattern::new)
}

/// A name in a list of modules, in any of the ways in which writers mean it.
enum Pattern {
    /// `re:` and a regular expression that a module's name begins with (compressed-tensors, Quark).
    Regex(Regex),
    /// A name with `*` and `?`, as a shell reads it (ModelOpt).
    Glob(String),
    /// Whole parts of a module's name, as `lm_head` or `layers.0.mlp` (transformers, vLLM).
    Parts(String),
    /// A class such as `Linear`, which a file does not tell of its layers: all of them.
    Class,
    /// A regular expression that is not understood.
    Unknown,
}

impl Pattern {
    fn new(text: &str) -> Self {
        match text.strip_prefix("re:") {
            // Python's `re.match` looks at the beginning, and asks for no end.
            Some(regex) => layer_regex(&format!("^(?:{regex})")).map_or(Self::Unknown, Self::Regex),
            None if text.contains(['*', '?']) => Self::Glob(text.to_owned()),
            None if text.starts_with(|c: char| c.is_ascii_uppercase()) && !text.contains('.') => Self::Class,
            None => Self::Parts(text.trim_matches('.').to_owned()),
        }
    }

    fn matches(&self, module: &str) -> bool {
        match self {
            Self::Regex(regex) => regex.is_match(module.as_bytes()),
            Self::Glob(glob) => is_glob_of(glob.as_bytes(), module.as_bytes()),
            Self::Parts(parts) => format!(".{module}.").contains(&format!(".{parts}.")),
            Self::Class => true,
            Self::Unknown => false,
        }
    }
}

/// Whether `name` is as `glob` says, in which `*` stands for any letters and `?` for one.
fn is_glob_of(glob: &[u8], name: &[u8]) -> bool {
    let (mut at, mut of) = (0, 0);
    // Behind the last star, and where the letters that it stands for end.
    let mut star: Option<(usize, usize)> = None;
    while of < name.len() {
        match (glob.get(at), star) {
            (Some(b'*'), _) => {
                at += 1;
                star = Some((at, of));
            }
            (Some(&letter), _) if letter == b'?' || letter == name[of] => (at, of) = (at + 1, of + 1),
            (_, Some((behind, end))) => {
                star = Some((behind, end + 1));
                (at, of) = (behind, end + 1);
            }
            _ => return false,
        }
    }
    glob[at..].iter().all(|&letter| letter == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_name_modules_in_every_way() {
        for (pattern, module, expected) in [
            ("lm_head", "lm_head", true),
            ("lm_head", "model.lm_head", true),
            ("lm_head", "lm_head_norm", false),
            ("model.layers.1", "model.layers.1.mlp.up_proj", true),
            ("model.layers.1", "model.layers.10.mlp.up_proj", false),
            ("visual.", "visual.blocks.0.attn", true),
            ("model.layers.0.self_attn*", "model.layers.0.self_attn.q_proj", true),
            ("model.layers.0*", "model.layers.1.self_attn.q_proj", false),
            ("*.gate", "model.layers.3.mlp.gate", true),
            ("*.gate", "model.layers.3.mlp.gate_proj", false),
            ("re:.*lm_head", "model.lm_head", true),
            ("re:.*self_attn\\.(q|k)_proj$", "model.layers.0.self_attn.k_proj", true),
            ("re:.*self_attn\\.(q|k)_proj$", "model.layers.0.self_attn.o_proj", false),
            ("re:mlp", "model.mlp", false),
            ("re:(", "model.mlp", false),
            ("Linear", "model.mlp", true),
        ] {
            assert_eq!(Pattern::new(pattern).matches(module), expected, "{pattern} of {module}");
        }
    }
}
