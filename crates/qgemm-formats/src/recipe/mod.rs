//! [`Recipe`]: llama.cpp's mixtures of formats, such as Q4_K_M. A recipe has a
//! format, and rules for tensors that lose more or less than others.

mod rules;
mod table;

use std::fmt;
use std::str::FromStr;

use crate::desc::{Encoding, Format};
use crate::error::FormatError;
use crate::formats::{mxfp4, plain, q6_k, q8_0};
use crate::model::Model;
use crate::model::gguf::GgufValue;
use crate::names::nearest;
use crate::quantize::format_for_k;
use rules::{Facts, Layer, RecipeDesc};

/// Handle to a recipe of llama.cpp, parsed from its name in any case.
///
/// ```
/// use qgemm_formats::Recipe;
/// let recipe: Recipe = "q4_k_m".parse()?;
/// assert_eq!((recipe.name(), recipe.format().name, recipe.file_type()), ("Q4_K_M", "q4_k", 15));
/// # Ok::<(), qgemm_formats::FormatError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Recipe(&'static RecipeDesc);

impl Recipe {
    /// All recipes.
    pub fn all() -> impl Iterator<Item = Recipe> + Clone {
        table::RECIPES.iter().map(Recipe)
    }

    /// Name in llama.cpp.
    pub fn name(self) -> &'static str {
        self.0.name
    }

    /// Format of most tensors.
    pub fn format(self) -> Format {
        Format::new(self.0.format)
    }

    /// `general.file_type` of GGUF files.
    pub fn file_type(self) -> u32 {
        self.0.file_type
    }
}

impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Recipe {
    type Err = FormatError;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let is_called = |recipe: &Recipe| {
            recipe.name().eq_ignore_ascii_case(name) || recipe.0.alias.is_some_and(|a| a.eq_ignore_ascii_case(name))
        };
        Recipe::all().find(is_called).ok_or_else(|| FormatError::UnknownRecipe {
            name: name.to_owned(),
            near: nearest(&name.to_ascii_uppercase(), Recipe::all().map(Recipe::name)),
        })
    }
}

/// Properties of a model that recipes depend on. 0 if unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelShape {
    /// `general.architecture` of GGUF files.
    pub architecture: String,
    /// Layers.
    pub layers: usize,
    /// Query heads of the first layer.
    pub heads: usize,
    /// Heads of keys and values of the first layer.
    pub kv_heads: usize,
    /// Experts of a layer, 0 without.
    pub experts: usize,
}

impl ModelShape {
    /// Properties by the metadata of a GGUF file.
    ///
    /// # Errors
    /// [`FormatError::BadFile`] without an architecture or a number of layers.
    pub fn of_gguf(model: &Model) -> Result<Self, FormatError> {
        let bad = |what: String| FormatError::BadFile { file: "GGUF file".into(), what };
        let architecture = model.metadata_value("general.architecture").and_then(GgufValue::as_str);
        let architecture =
            architecture.ok_or_else(|| bad("has no `general.architecture`, which recipes need".into()))?;
        let number = |key: &str| {
            let value = model.metadata_value(&format!("{architecture}.{key}"))?;
            // Layers may differ: then it is an array.
            let first = match value {
                GgufValue::Array(array) => array.scalar(0)?.as_u64(),
                value => value.as_u64(),
            };
            usize::try_from(first?).ok()
        };
        let layers = number("block_count");
        let layers = layers.ok_or_else(|| bad(format!("has no `{architecture}.block_count`, which recipes need")))?;
        let heads = number("attention.head_count").unwrap_or(0);
        Ok(Self {
            layers,
            heads,
            kv_heads: number("attention.head_count_kv").unwrap_or(heads),
            experts: number("expert_count").unwrap_or(0),
            architecture: architecture.to_owned(),
        })
    }

    /// Query heads for each head of keys and values.
    fn group(&self) -> usize {
        self.heads.checked_div(self.kv_heads).unwrap_or(0)
    }

    /// Whether llama.cpp takes it for a model of 70 billion weights, whose
    /// value projections are small.
    fn is_70b(&self) -> bool {
        match self.architecture.as_str() {
            "llama" | "llama-embed" => self.layers == 80 && self.heads != self.kv_heads && self.experts != 8,
            "qwen2" | "deci" | "olmo" => self.layers == 80,
            "jais2" => self.layers == 68,
            _ => false,
        }
    }
}

/// Options of a recipe.
#[derive(Clone, Copy, Debug, Default)]
pub struct RecipeOptions {
    /// Whether all tensors have the recipe's format.
    pub pure: bool,
    /// Whether an importance matrix is given.
    pub has_importance: bool,
    /// Format of `output.weight`, and of an embedding that is also the output.
    pub output: Option<Format>,
    /// Format of `token_embd.weight`.
    pub embedding: Option<Format>,
}

/// Role of a tensor in recipes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Embedding,
    Output,
    /// The value projection, alone or fused with others.
    AttnV,
    AttnK,
    AttnOutput,
    FfnDown,
    Other,
}

impl Role {
    /// Role by a tensor's name in GGUF files or checkpoints of `transformers`.
    fn of(name: &str) -> Self {
        const BY_PART: [(&str, Role); 15] = [
            ("attn_qkv.weight", Role::AttnV),
            ("attn_kv_b.weight", Role::AttnV),
            ("attn_v.weight", Role::AttnV),
            ("attn_k.weight", Role::AttnK),
            ("attn_q.weight", Role::Other),
            ("attn_output.weight", Role::AttnOutput),
            ("ffn_up", Role::Other),
            ("ffn_gate", Role::Other),
            ("ffn_down", Role::FfnDown),
            ("self_attn.qkv_proj.weight", Role::AttnV),
            ("self_attn.v_proj.weight", Role::AttnV),
            ("self_attn.k_proj.weight", Role::AttnK),
            ("self_attn.o_proj.weight", Role::AttnOutput),
            ("down_proj", Role::FfnDown),
            (".w2.weight", Role::FfnDown),
        ];
        match name {
            "output.weight" | "lm_head.weight" => Self::Output,
            "token_embd.weight" | "per_layer_token_embd.weight" | "model.embed_tokens.weight" => Self::Embedding,
            name => BY_PART.iter().find(|(part, _)| name.contains(part)).map_or(Self::Other, |(_, role)| *role),
        }
    }
}

/// Choice of the format of each tensor of a model, in llama.cpp's order
/// ([`TypeChooser::sort_key`]): rules count the tensors of a role.
#[derive(Debug)]
pub struct TypeChooser {
    recipe: Recipe,
    shape: ModelShape,
    options: RecipeOptions,
    /// Whether the embedding is also the output.
    tied: bool,
    /// Value projections: all, and those chosen so far.
    attn_v: (usize, usize),
    ffn_down: usize,
}

impl TypeChooser {
    /// Begins with a model of tensors with these names.
    pub fn new<'a>(
        recipe: Recipe,
        shape: ModelShape,
        options: RecipeOptions,
        names: impl Iterator<Item = &'a str> + Clone,
    ) -> Self {
        let count = |role| names.clone().filter(|name| Role::of(name) == role).count();
        let (tied, attn_v) = (count(Role::Output) == 0, (count(Role::AttnV), 0));
        Self { recipe, shape, options, tied, attn_v, ffn_down: 0 }
    }

    /// Key by which llama.cpp sorts a file's tensors: layer (−1 without), then name.
    pub fn sort_key(name: &str) -> (i64, &str) {
        (layer_of(name).map_or(-1, |layer| layer as i64), name)
    }

    /// Format of a tensor that is to be quantized. `named` is the format that
    /// the user gave its name, and `shape` the dimensions, outermost first.
    ///
    /// The format may be a fallback: blocks always divide K, unless an option
    /// gives the embedding or output another format.
    ///
    /// # Errors
    /// [`FormatError::NeedsImportance`]. [`FormatError::BadFile`] when a model of
    /// experts has a tensor outside its layers.
    pub fn choose(&mut self, name: &str, shape: &[usize], named: Option<Format>) -> Result<Format, FormatError> {
        let role = Role::of(name);
        let is_free = named.is_none() || name != "per_layer_token_embd.weight";
        if let Some(format) = self.options.embedding.filter(|_| role == Role::Embedding && is_free) {
            return Ok(format);
        }
        if let Some(format) = self.options.output.filter(|_| role == Role::Output) {
            return Ok(format);
        }
        let format = self.recipe.format();
        let chosen = match named {
            Some(named) => named,
            None if self.options.pure || matches!(format.encoding, Encoding::Plain(_)) => format,
            None => self.by_rules(role, name, shape)?,
        };
        let chosen = fallback(chosen, shape.last().copied().unwrap_or(0));
        let is_table = matches!(role, Role::Embedding | Role::Output);
        if self.recipe.0.needs_importance && !self.options.has_importance && !is_table && chosen == format {
            return Err(FormatError::NeedsImportance { recipe: self.recipe.name(), tensor: name.to_owned() });
        }
        Ok(chosen)
    }

    fn by_rules(&mut self, role: Role, name: &str, shape: &[usize]) -> Result<Format, FormatError> {
        let (desc, format, facts) = (self.recipe.0, self.recipe.format(), self.facts());
        let eight_experts = facts.experts == 8;
        if role == Role::Output || role == Role::Embedding && self.tied {
            return Ok(self.options.output.unwrap_or_else(|| self.output(shape.last().copied().unwrap_or(0))));
        }
        if desc.only_experts {
            let is_expert = shape.len() > 2 && shape[shape.len() - 3] > 1 || name.contains(".experts.");
            return Ok(Format::new(if is_expert { &mxfp4::MXFP4 } else { &q8_0::Q8_0 }));
        }
        Ok(match role {
            Role::Embedding => desc.embedding.map_or(format, Format::new),
            Role::AttnV => {
                let (count, at) = self.attn_v;
                self.attn_v.1 += 1;
                let chosen = rules::first(desc.attn_v, facts, Layer { at, count }).unwrap_or(format);
                match eight_experts {
                    true => Format::new(&q8_0::Q8_0),
                    false if self.shape.is_70b() => rules::of_70b(chosen),
                    false => chosen,
                }
            }
            Role::AttnK if eight_experts => Format::new(&q8_0::Q8_0),
            Role::AttnOutput => rules::first(desc.attn_output, facts, Layer { at: 0, count: 0 }).unwrap_or(format),
            Role::FfnDown => {
                let layer = self.ffn_layer(name)?;
                self.ffn_down += 1;
                rules::first(desc.ffn_down, facts, layer).unwrap_or(format)
            }
            Role::AttnK | Role::Other | Role::Output => format,
        })
    }

    fn facts(&self) -> Facts {
        Facts {
            group: self.shape.group(),
            experts: self.shape.experts,
            has_importance: self.options.has_importance,
            is_falcon: self.shape.architecture == "falcon",
        }
    }

    /// Format of the output.
    fn output(&self, k: usize) -> Format {
        let format = self.recipe.format();
        let is_q8 = self.recipe.0.only_experts
            || self.facts().is_falcon
            || !k.is_multiple_of(format.block_len)
            || format == Format::new(&q8_0::Q8_0);
        Format::new(if is_q8 { &q8_0::Q8_0 } else { &q6_k::Q6_K })
    }

    /// Layer of a down projection: by count, or by name where layers have several.
    fn ffn_layer(&self, name: &str) -> Result<Layer, FormatError> {
        let count = self.shape.layers;
        if self.shape.experts <= 1 {
            return Ok(Layer { at: self.ffn_down, count });
        }
        let bad = || FormatError::BadFile {
            file: "model".into(),
            what: format!("tensor `{name}` is of no layer: expected `blk.0.` to `blk.{}.`", count.saturating_sub(1)),
        };
        let at = layer_of(name).filter(|&at| at < count).ok_or_else(bad)?;
        Ok(Layer { at, count })
    }
}

/// Layer of a tensor: the number in `blk.7.attn_q.weight` or
/// `model.layers.7.self_attn.q_proj.weight`.
fn layer_of(name: &str) -> Option<usize> {
    let rest = ["blk.", "model.layers."].into_iter().find_map(|prefix| name.strip_prefix(prefix))?;
    rest.split_once('.')?.0.parse().ok()
}

/// `format`, or its fallback for rows of `k` values. Unlike
/// [`format_for_k`], formats of blocks of 32 fall back to F16.
fn fallback(format: Format, k: usize) -> Format {
    format_for_k(format, k).unwrap_or(Format::new(&plain::F16))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::q4_k;

    fn recipe(name: &str) -> Recipe {
        name.parse().expect("a recipe")
    }

    fn shape(architecture: &str, [layers, heads, kv_heads, experts]: [usize; 4]) -> ModelShape {
        ModelShape { architecture: architecture.into(), layers, heads, kv_heads, experts }
    }

    #[test]
    fn names_in_any_case_and_aliases() {
        assert_eq!(recipe("q3_k").name(), "Q3_K_M");
        assert_eq!(recipe("iq4_xs").file_type(), 30);
        let error = "Q4_KM".parse::<Recipe>().expect_err("misspelt").to_string();
        assert!(error.contains("Q4_K_M"), "{error}");
        let mut types: Vec<u32> = Recipe::all().map(Recipe::file_type).collect();
        types.sort_unstable();
        types.dedup();
        assert_eq!(types.len(), Recipe::all().count());
    }

    #[test]
    fn layers_are_sorted_by_number() {
        let mut names = ["output.weight", "blk.10.a", "blk.2.b", "blk.2.a", "blk.x", "Blk.1.a"];
        names.sort_by_key(|name| TypeChooser::sort_key(name));
        assert_eq!(names, ["Blk.1.a", "blk.x", "output.weight", "blk.2.a", "blk.2.b", "blk.10.a"]);
    }

    #[test]
    fn options_come_before_rules() {
        let f16: Format = "f16".parse().expect("a format");
        let options = RecipeOptions { output: Some(f16), embedding: Some(f16), ..RecipeOptions::default() };
        let names = ["output.weight", "token_embd.weight"];
        let model = shape("llama", [2, 4, 4, 0]);
        let mut chooser = TypeChooser::new(recipe("Q4_K_M"), model.clone(), options, names.into_iter());
        for name in names {
            assert_eq!(chooser.choose(name, &[8, 256], Some(Format::new(&q4_k::Q4_K))), Ok(f16));
        }
        let named = Some(Format::new(&q8_0::Q8_0));
        assert_eq!(chooser.choose("per_layer_token_embd.weight", &[8, 256], named), Ok(Format::new(&q8_0::Q8_0)));
        let pure = RecipeOptions { pure: true, ..RecipeOptions::default() };
        let mut chooser = TypeChooser::new(recipe("Q4_K_M"), model, pure, names.into_iter());
        assert_eq!(chooser.choose("output.weight", &[8, 256], None), Ok(Format::new(&q4_k::Q4_K)));
        assert_eq!(chooser.choose("output.weight", &[8, 100], None), Ok(f16));
    }

    #[test]
    fn the_smallest_recipe_needs_importance() {
        let choose = |has_importance| {
            let options = RecipeOptions { has_importance, ..RecipeOptions::default() };
            let names = ["blk.0.attn_q.weight"];
            TypeChooser::new(recipe("Q2_K_S"), shape("llama", [2, 4, 4, 0]), options, names.into_iter()).choose(
                names[0],
                &[8, 256],
                None,
            )
        };
        let error = choose(false).expect_err("no matrix").to_string();
        assert!(error.contains("blk.0.attn_q.weight") && error.contains("--imatrix"), "{error}");
        assert!(choose(true).is_ok());
    }

    #[test]
    fn experts_are_found_by_the_number_of_their_layer() {
        let model = shape("llama", [32, 32, 8, 8]);
        let mut chooser =
            TypeChooser::new(recipe("Q4_K_M"), model, RecipeOptions::default(), ["output.weight"].into_iter());
        let mut choose = |name: &str| chooser.choose(name, &[8, 512, 256], None).map(|format| format.name);
        assert_eq!(choose("blk.31.ffn_down_exps.weight"), Ok("q6_k"));
        assert_eq!(choose("blk.4.ffn_down_exps.weight"), Ok("q4_k"));
        assert_eq!(choose("blk.4.attn_v.weight"), Ok("q8_0"));
        assert_eq!(choose("blk.4.attn_output.weight"), Ok("q5_k"));
        for outside in ["blk.32.ffn_down_exps.weight", "ffn_down.weight"] {
            assert!(matches!(choose(outside), Err(FormatError::BadFile { .. })), "{outside}");
        }
    }
}
