//! The format of each tensor: one format for all, or llama.cpp's
//! recipe, with exceptions by name.

use std::path::Path;
use std::str::FromStr;

use anyhow::{Context, bail, ensure};
use qgemm_api::gguf::file_type;
use qgemm_api::{Format, Model, Recipe, RecipeOptions, TypeChooser, format_for_k, model_shape, printable};
use regex::bytes::{Regex, RegexBuilder};

/// Options of formats.
#[derive(clap::Args)]
pub struct TypeOptions {
    /// Recipe of formats: Q4_K_M, Q5_K_S, IQ4_XS, Q8_0 and others, in
    /// any case. Tensors get the formats that llama.cpp's
    /// `llama-quantize` gives them, and the file its order.
    #[arg(value_name = "RECIPE")]
    recipe: Option<Recipe>,
    /// One format for all weights, instead of a recipe. Weights are
    /// tensors of two or more dimensions whose name ends in `weight`.
    /// Norms, embeddings of positions and types, expert gating and
    /// others that llama.cpp keeps are excluded. All other tensors
    /// are copied.
    #[arg(long, conflicts_with = "recipe", required_unless_present = "recipe")]
    format: Option<Format>,
    /// Use the recipe's main format for all weights.
    #[arg(long, requires = "recipe")]
    pure: bool,
    /// Format of `output.weight`, and of an embedding that is also
    /// the output.
    #[arg(long, value_name = "FORMAT", requires = "recipe")]
    output_tensor_type: Option<Format>,
    /// Format of `token_embd.weight`.
    #[arg(long, value_name = "FORMAT", requires = "recipe")]
    token_embedding_type: Option<Format>,
    /// Format of the weights in whose names the regular expression is
    /// found. The first that is found counts. May be repeated.
    #[arg(long = "tensor-type", value_name = "REGEX=FORMAT")]
    named: Vec<NamedType>,
}

/// A format for names.
#[derive(Clone)]
struct NamedType {
    pattern: Regex,
    format: Format,
}

impl FromStr for NamedType {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let (pattern, format) = text.rsplit_once('=').context("expected REGEX=FORMAT, such as attn_v=q8_0")?;
        ensure!(!pattern.is_empty(), "expected a regular expression before `=`");
        // llama.cpp's names are lower case, and so are its patterns.
        let pattern = RegexBuilder::new(&pattern.to_ascii_lowercase()).unicode(false).build()?;
        Ok(Self { pattern, format: format.parse()? })
    }
}

/// How formats are chosen.
enum Chooser {
    Uniform(Format),
    Recipe(TypeChooser),
}

/// Choice of the formats of a model's tensors, in their order.
pub struct Types<'a> {
    options: &'a TypeOptions,
    chooser: Chooser,
}

impl TypeOptions {
    /// Whether tensors are sorted and counted as by llama.cpp.
    pub fn is_recipe(&self) -> bool {
        self.recipe.is_some()
    }

    /// `general.file_type` of the result, if llama.cpp has a number.
    pub fn file_type(&self) -> Option<u32> {
        match self.recipe {
            Some(recipe) => Some(recipe.file_type()),
            None => self.format.and_then(|format| format.ggml_type).and_then(file_type),
        }
    }

    /// Begins the choice for the model at `path`, whose tensors have these
    /// names in the output.
    ///
    /// # Errors
    /// When a recipe lacks what it must know of the model, GGUF lacks a
    /// format, or a pattern is found in no name.
    pub fn of<'a, 'n>(
        &'a self,
        model: &Model,
        path: &Path,
        names: impl Iterator<Item = &'n str> + Clone,
        has_importance: bool,
    ) -> anyhow::Result<Types<'a>> {
        for NamedType { pattern, .. } in &self.named {
            let found = names.clone().any(|name| pattern.is_match(name.as_bytes()));
            ensure!(found, "--tensor-type: `{}` is found in no tensor's name", printable(pattern.as_str()));
        }
        let named = self.named.iter().map(|named| named.format);
        let all = [self.format, self.output_tensor_type, self.token_embedding_type].into_iter().flatten().chain(named);
        for format in all {
            ensure!(format.ggml_type.is_some(), "GGUF does not have {format}");
        }
        let chooser = match (self.recipe, self.format) {
            (Some(recipe), _) => {
                let options = RecipeOptions {
                    pure: self.pure,
                    has_importance,
                    output: self.output_tensor_type,
                    embedding: self.token_embedding_type,
                };
                let shape = model_shape(model, path).context("a recipe depends on the model (--format does not)")?;
                Chooser::Recipe(TypeChooser::new(recipe, shape, options, names))
            }
            (None, Some(format)) => Chooser::Uniform(format),
            (None, None) => bail!("expected a recipe or --format"),
        };
        Ok(Types { options: self, chooser })
    }
}

impl Types<'_> {
    /// Format of the next tensor to quantize, and a note if it is not the
    /// expected one.
    ///
    /// # Errors
    /// When no format fits the tensor.
    pub fn next(&mut self, name: &str, shape: &[usize]) -> anyhow::Result<(Format, Option<String>)> {
        let named = self.options.named.iter().find(|named| named.pattern.is_match(name.as_bytes()));
        let named = named.map(|named| named.format);
        let k = shape.last().copied().unwrap_or(0);
        let (wanted, format) = match &mut self.chooser {
            Chooser::Uniform(format) => {
                let wanted = named.unwrap_or(*format);
                let found = format_for_k(wanted, k);
                (wanted, found.with_context(|| format!("{name} (`--keep {name}` copies it as it is)"))?)
            }
            Chooser::Recipe(chooser) => {
                let format = chooser.choose(name, shape, named)?;
                format.check_k(k).with_context(|| name.to_owned())?;
                (named.unwrap_or(format), format)
            }
        };
        let note = (format != wanted).then(|| format!("K = {k} is no multiple of {}", wanted.block_len));
        Ok((format, note))
    }
}
