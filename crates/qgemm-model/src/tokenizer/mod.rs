//! Tokenizers: from `tokenizer.json`, or from the vocabulary of a GGUF file.

mod end_texts;
mod gguf;
mod pre_tokenizer;

use std::collections::BTreeSet;
use std::path::Path;

use qgemm_api::Model;
use qgemm_api::gguf::GgufValue;
use serde_json::Value;
use tokenizers::models::wordlevel::WordLevel;

use self::end_texts::END_TEXTS;
use crate::beside::{json_beside, text_beside};
use crate::error::Error;

/// A tokenizer with its special tokens.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// Id of bytes without a token, which are left out.
    absent_id: Option<u32>,
    /// Token that begins a text, where the tokenizer itself does not add it.
    bos_to_add: Option<u32>,
    end_ids: BTreeSet<u32>,
    bos_text: Option<String>,
    eos_text: Option<String>,
}

impl Tokenizer {
    /// Opens the tokenizer of the model at `path`.
    ///
    /// # Errors
    /// [`Error::NoTokenizer`], [`Error::UnservedTokenizer`], [`Error::Tokenizer`]; [`Error::Io`], [`Error::Json`].
    pub fn open(model: &Model, path: &Path) -> Result<Self, Error> {
        if model.metadata().is_empty() { Self::beside(path) } else { Self::of_gguf(model) }
    }

    /// From the files beside a checkpoint.
    fn beside(path: &Path) -> Result<Self, Error> {
        let text = text_beside(path, "tokenizer.json")?
            .ok_or_else(|| Error::NoTokenizer { expected: "tokenizer.json beside the checkpoint".into() })?;
        let inner = tokenizers::Tokenizer::from_bytes(text).map_err(Error::tokenizer)?;
        let config = json_beside(path, "tokenizer_config.json")?.unwrap_or_default();
        let mut end_ids = BTreeSet::new();
        for file in ["generation_config.json", "config.json"] {
            let json = json_beside(path, file)?.unwrap_or_default();
            end_ids.extend(ids(&json["eos_token_id"]));
        }
        let eos_text = token_text(&config["eos_token"]);
        end_ids.extend(eos_text.as_deref().and_then(|text| inner.token_to_id(text)));
        let bos_text = token_text(&config["bos_token"]);
        Ok(Self { inner, absent_id: None, bos_to_add: None, end_ids, bos_text, eos_text }.with_end_texts())
    }

    /// From the vocabulary of a GGUF file.
    fn of_gguf(model: &Model) -> Result<Self, Error> {
        if model.metadata_value("tokenizer.ggml.model").and_then(GgufValue::as_str) == Some("none") {
            return Ok(Self::without_tokens());
        }
        let vocabulary = gguf::Vocabulary::read(model)?;
        let json = serde_json::to_vec(&vocabulary.tokenizer_json()?).map_err(Error::tokenizer)?;
        let inner = tokenizers::Tokenizer::from_bytes(json).map_err(Error::tokenizer)?;
        let id = |key: &str| {
            model.metadata_value(&format!("tokenizer.ggml.{key}")).and_then(GgufValue::as_f64).map(|id| id as u32)
        };
        let end_ids = ["eos_token_id", "eot_token_id", "eom_token_id"].iter().filter_map(|key| id(key)).collect();
        let bos = id("bos_token_id");
        let bos_to_add = bos.filter(|_| vocabulary.adds_bos());
        let text = |id: Option<u32>| id.and_then(|id| inner.id_to_token(id));
        let (bos_text, eos_text) = (text(bos), text(id("eos_token_id")));
        let absent_id = vocabulary.absent_id();
        Ok(Self { inner, absent_id, bos_to_add, end_ids, bos_text, eos_text }.with_end_texts())
    }

    /// For a model that states to have no tokenizer, and takes ids alone: encoding a text fails.
    fn without_tokens() -> Self {
        let inner = tokenizers::Tokenizer::new(WordLevel::default());
        let (end_ids, bos_to_add, absent_id) = (BTreeSet::new(), None, None);
        Self { inner, absent_id, bos_to_add, end_ids, bos_text: None, eos_text: None }
    }

    /// The tokenizer of an encoder: without padding, and texts cut to `most` tokens.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub(crate) fn of_encoder(mut self, most: usize) -> Result<Self, Error> {
        let cut = tokenizers::TruncationParams { max_length: most, ..tokenizers::TruncationParams::default() };
        self.inner.with_padding(None).with_truncation(Some(cut)).map_err(Error::tokenizer)?;
        Ok(self)
    }

    fn with_end_texts(mut self) -> Self {
        let added = self.inner.get_added_vocabulary();
        let special = |text: &&str| self.inner.token_to_id(text).filter(|_| added.is_special_token(text));
        let more: Vec<u32> = END_TEXTS.iter().filter_map(special).collect();
        self.end_ids.extend(more);
        self
    }

    /// Tokens of a text, with the special tokens that the model
    /// expects before and after it.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        let ids = self.encode_with(text, true)?;
        Ok(self.bos_to_add.into_iter().chain(ids).collect())
    }

    /// Tokens of a text that a chat template made, which has its special tokens.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn encode_chat(&self, text: &str) -> Result<Vec<u32>, Error> {
        self.encode_with(text, false)
    }

    fn encode_with(&self, text: &str, special: bool) -> Result<Vec<u32>, Error> {
        let encoding = self.inner.encode_fast(text, special).map_err(Error::tokenizer)?;
        Ok(encoding.get_ids().iter().copied().filter(|id| Some(*id) != self.absent_id).collect())
    }

    /// The text of tokens, without special tokens.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn decode(&self, ids: &[u32]) -> Result<String, Error> {
        self.inner.decode(ids, true).map_err(Error::tokenizer)
    }

    /// Whether a token ends the text.
    pub fn is_end(&self, id: u32) -> bool {
        self.end_ids.contains(&id)
    }

    /// Number of tokens.
    pub fn vocabulary(&self) -> usize {
        self.inner.get_vocab_size(true) - usize::from(self.absent_id.is_some())
    }

    /// The beginning-of-text token, for chat templates.
    pub(crate) fn bos_text(&self) -> Option<&str> {
        self.bos_text.as_deref()
    }

    /// The end-of-text token, for chat templates.
    pub(crate) fn eos_text(&self) -> Option<&str> {
        self.eos_text.as_deref()
    }
}

/// Token ids of a JSON number or list.
fn ids(value: &Value) -> Vec<u32> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match value {
        Value::Array(items) => items.iter().filter_map(id).collect(),
        other => id(other).into_iter().collect(),
    }
}

/// The text of a token in `tokenizer_config.json`: a string, or an object with its `content`.
fn token_text(value: &Value) -> Option<String> {
    value.as_str().or(value["content"].as_str()).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use qgemm_api::gguf::{GgufArray, GgufHeader, GgufScalar, GgufValue};
    use qgemm_api::open_model;
    use serde_json::json;

    use super::*;

    #[test]
    fn ids_and_texts_of_configs() {
        assert_eq!(ids(&json!(2)), [2]);
        assert_eq!(ids(&json!([2, 7])), [2, 7]);
        assert!(ids(&json!(null)).is_empty());
        assert_eq!(token_text(&json!("</s>")).as_deref(), Some("</s>"));
        assert_eq!(token_text(&json!({ "content": "</s>", "lstrip": false })).as_deref(), Some("</s>"));
        assert_eq!(token_text(&json!(null)), None);
    }

    /// Ids by the tokenizer of a GGUF file with these tokens, their
    /// types and merges.
    fn encoded(model: &str, tokens: &[(&str, u32)], merges: &[&str], text: &str) -> Vec<u32> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("model.gguf");
        let mut header = GgufHeader::new();
        let mut add = |key: &str, value: GgufValue| header.metadata(key, value).expect("a new key");
        let strings =
            |items: Vec<&str>| GgufValue::Array(GgufArray::Strings(items.into_iter().map(str::to_owned).collect()));
        let bytes = |kind: u32, words: Vec<[u8; 4]>| {
            GgufValue::Array(GgufArray::Scalars { kind, bytes: words.concat().into() })
        };
        add("tokenizer.ggml.model", model.into());
        add("tokenizer.ggml.pre", "smollm".into());
        add("tokenizer.ggml.add_bos_token", GgufScalar::Bool(false).into());
        add("tokenizer.ggml.tokens", strings(tokens.iter().map(|(token, _)| *token).collect()));
        add("tokenizer.ggml.merges", strings(merges.to_vec()));
        add("tokenizer.ggml.token_type", bytes(4, tokens.iter().map(|(_, kind)| kind.to_le_bytes()).collect()));
        add("tokenizer.ggml.scores", bytes(6, vec![[0; 4]; tokens.len()]));
        header.write(std::fs::File::create(&path).expect("writable")).expect("writable").finish().expect("complete");
        let model = open_model(&path).expect("a model");
        Tokenizer::open(&model, &path).expect("a tokenizer").encode(text).expect("encoded")
    }

    #[test]
    fn bytes_without_a_token_prevent_merges_and_are_left_out() {
        let (tokens, merges) = ([("Ġ", 1), ("-", 1), ("Ġ-", 1)], ["Ġ -"]);
        assert_eq!(encoded("gpt2", &tokens, &merges, " -"), [2]);
        assert_eq!(encoded("gpt2", &tokens, &merges, " \u{6}-\u{6}"), [0, 1]);
        // A token with the text that stands for such bytes.
        let tokens = [("Ġ", 1), ("-", 1), ("\0", 3)];
        assert_eq!(encoded("gpt2", &tokens, &[], "-\u{6} "), [1, 0]);
    }

    #[test]
    fn control_tokens_are_known_by_type_or_text() {
        let tokens = [("<unk>", 2), ("▁", 1), ("<tool>", 4), ("</s>", 1), ("<pad>", 3), ("a", 1)];
        assert_eq!(encoded("llama", &tokens, &[], "a<unk>a</s><tool><pad>"), [1, 5, 0, 1, 5, 3, 2, 4]);
    }

    #[test]
    fn a_gguf_file_without_a_vocabulary_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("model.gguf");
        let mut header = GgufHeader::new();
        header.metadata("general.architecture", "llama".into()).expect("a new key");
        header.metadata("llama.rope.freq_base", GgufScalar::F32(1e4).into()).expect("a new key");
        header.write(std::fs::File::create(&path).expect("writable")).expect("writable").finish().expect("complete");
        let model = open_model(&path).expect("a model");
        assert!(matches!(Tokenizer::open(&model, &path), Err(Error::NoTokenizer { .. })));
    }

    #[test]
    fn a_model_may_state_to_have_no_tokenizer() {
        let tokenizer = Tokenizer::without_tokens();
        assert!(matches!(tokenizer.encode("a"), Err(Error::Tokenizer { .. })));
        assert_eq!((tokenizer.decode(&[1, 2]).expect("decoded").as_str(), tokenizer.vocabulary()), ("", 0));
    }
}
