//! The vocabulary of a GGUF file as a `tokenizer.json`: byte-level BPE, SentencePiece BPE and WordPiece.

use std::collections::HashMap;

use qgemm_api::Model;
use qgemm_api::gguf::{GgufArray, GgufScalar, GgufValue};
use serde_json::{Map, Value, json};

use super::end_texts::END_TEXTS;
use super::pre_tokenizer::PreTokenizer;
use crate::error::Error;

/// Token types of llama.cpp.
const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;

/// Placeholder of a byte without a token. No byte-level text
/// has this character.
const ABSENT: &str = "\0";

/// Tokens, scores and merges of a GGUF file.
pub struct Vocabulary<'m> {
    model: &'m Model,
    tokens: &'m [String],
    kind: Kind,
}

/// The algorithm.
enum Kind {
    /// Byte-level BPE with stated merges (`gpt2`).
    ByteLevel(&'static PreTokenizer),
    /// BPE whose merges follow from scores (`llama`, SentencePiece).
    SentencePiece,
    /// WordPiece (`bert`).
    WordPiece,
}

impl<'m> Vocabulary<'m> {
    /// Reads the vocabulary of `model`.
    ///
    /// # Errors
    /// [`Error::NoTokenizer`], [`Error::UnservedTokenizer`].
    pub fn read(model: &'m Model) -> Result<Self, Error> {
        let missing = || Error::NoTokenizer { expected: "`tokenizer.ggml.tokens` in the GGUF file".into() };
        let tokens = strings(model, "tokens").ok_or_else(missing)?;
        let kind = match text(model, "model") {
            Some("gpt2") => {
                let pre = text(model, "pre").unwrap_or_default();
                let found = PreTokenizer::named(pre).ok_or_else(|| Error::UnservedTokenizer {
                    key: "tokenizer.ggml.pre",
                    got: pre.to_owned(),
                    served: PreTokenizer::served(),
                })?;
                Kind::ByteLevel(found)
            }
            Some("llama") => Kind::SentencePiece,
            Some("bert") => Kind::WordPiece,
            other => {
                return Err(Error::UnservedTokenizer {
                    key: "tokenizer.ggml.model",
                    got: other.unwrap_or_default().to_owned(),
                    served: vec!["gpt2", "llama", "bert"],
                });
            }
        };
        Ok(Self { model, tokens, kind })
    }

    /// Whether texts begin with the beginning-of-text token.
    pub fn adds_bos(&self) -> bool {
        let by_default = match self.kind {
            Kind::ByteLevel(pre) => pre.adds_bos,
            Kind::SentencePiece => true,
            // Its template adds CLS and SEP.
            Kind::WordPiece => return false,
        };
        flag(self.model, "add_bos_token").unwrap_or(by_default)
    }

    /// Id of bytes that have no token, behind those of the
    /// vocabulary. They prevent merges, and are then left out, as
    /// llama.cpp does.
    pub fn absent_id(&self) -> Option<u32> {
        let is_free = self.tokens.iter().all(|token| token != ABSENT);
        let serves = matches!(self.kind, Kind::ByteLevel(_)) && is_free;
        u32::try_from(self.tokens.len()).ok().filter(|_| serves)
    }

    /// The tokenizer as a `tokenizer.json`.
    ///
    /// # Errors
    /// [`Error::NoTokenizer`] without merges or scores.
    pub fn tokenizer_json(&self) -> Result<Value, Error> {
        let mut vocabulary: Map<String, Value> =
            self.tokens.iter().cloned().zip((0..).map(|id: u32| id.into())).collect();
        vocabulary.extend(self.absent_id().map(|id| (ABSENT.to_owned(), id.into())));
        let mut json = match self.kind {
            Kind::ByteLevel(pre) => self.byte_level(pre)?,
            Kind::SentencePiece => self.sentence_piece()?,
            Kind::WordPiece => return self.word_piece(),
        };
        json["model"]["type"] = "BPE".into();
        json["model"]["vocab"] = vocabulary.into();
        json["version"] = "1.0".into();
        json["added_tokens"] = self.added_tokens().into();
        Ok(json)
    }

    fn byte_level(&self, pre: &PreTokenizer) -> Result<Value, Error> {
        let missing = || Error::NoTokenizer { expected: "`tokenizer.ggml.merges` in the GGUF file".into() };
        let merges = strings(self.model, "merges").ok_or_else(missing)?;
        // A space within a token is written as another character, so the first space separates.
        let pairs: Vec<Value> =
            merges.iter().filter_map(|merge| merge.split_once(' ')).map(|(a, b)| json!([a, b])).collect();
        Ok(json!({
            "normalizer": null,
            "pre_tokenizer": pre.json(),
            "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
            "model": {
                "merges": pairs,
                "unk_token": self.absent_id().map(|_| ABSENT),
                "ignore_merges": pre.ignore_merges,
                "byte_fallback": false,
                "fuse_unk": false,
            },
        }))
    }

    fn sentence_piece(&self) -> Result<Value, Error> {
        let missing = || Error::NoTokenizer { expected: "`tokenizer.ggml.scores` in the GGUF file".into() };
        let Some(GgufValue::Array(scores)) = self.model.metadata_value("tokenizer.ggml.scores") else {
            return Err(missing());
        };
        let scores: Vec<f32> = (0..self.tokens.len()).map_while(|id| score(scores, id)).collect();
        if scores.len() != self.tokens.len() {
            return Err(missing());
        }
        let space = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" });
        let mut steps = vec![space];
        let mut decoders = vec![
            json!({ "type": "Replace", "pattern": { "String": "▁" }, "content": " " }),
            json!({ "type": "ByteFallback" }),
            json!({ "type": "Fuse" }),
        ];
        if flag(self.model, "add_space_prefix").unwrap_or(true) {
            steps.insert(0, json!({ "type": "Prepend", "prepend": "▁" }));
            decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
        }
        let unknown = number(self.model, "unknown_token_id").unwrap_or(0);
        Ok(json!({
            "normalizer": { "type": "Sequence", "normalizers": steps },
            "pre_tokenizer": null,
            "decoder": { "type": "Sequence", "decoders": decoders },
            "model": {
                "merges": merges_of_scores(self.tokens, &scores),
                "unk_token": self.tokens.get(unknown as usize),
                "byte_fallback": true,
                "fuse_unk": true,
                "ignore_merges": false,
            },
        }))
    }

    /// WordPiece, whose words begin with `▁` in GGUF, and whose other pieces begin with `##` in `tokenizer.json`.
    fn word_piece(&self) -> Result<Value, Error> {
        let text = |token: &String| match token.strip_prefix('▁') {
            Some(word) => word.to_owned(),
            None if token.starts_with('[') && token.ends_with(']') => token.clone(),
            None => format!("##{token}"),
        };
        let tokens: Vec<String> = self.tokens.iter().map(text).collect();
        let named = |key: &str, default: u64| {
            let id = number(self.model, key).unwrap_or(default);
            let token = usize::try_from(id).ok().and_then(|id| tokens.get(id));
            let missing = || Error::NoTokenizer { expected: format!("token {id} (`tokenizer.ggml.{key}`)") };
            token.map(|token| (id, token.as_str())).ok_or_else(missing)
        };
        let (cls, sep) = (named("cls_token_id", 101)?, named("seperator_token_id", 102)?);
        let (_, unknown) = named("unknown_token_id", 100)?;
        let token = |(_, text): (u64, &str)| json!({ "SpecialToken": { "id": text, "type_id": 0 } });
        let entry = |(id, text): (u64, &str)| json!({ "id": text, "ids": [id], "tokens": [text] });
        let sequence = |name: &str| json!({ "Sequence": { "id": name, "type_id": 0 } });
        let vocabulary: Map<String, Value> = tokens.iter().cloned().zip((0..).map(|id: u32| id.into())).collect();
        Ok(json!({
            "version": "1.0",
            "added_tokens": self.added_tokens(),
            "normalizer": {
                "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null,
                "lowercase": true,
            },
            "pre_tokenizer": { "type": "BertPreTokenizer" },
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [token(cls), sequence("A"), token(sep)],
                "pair": [token(cls), sequence("A"), token(sep), sequence("B"), token(sep)],
                "special_tokens": { cls.1: entry(cls), sep.1: entry(sep) },
            },
            "decoder": { "type": "WordPiece", "prefix": "##", "cleanup": true },
            "model": {
                "type": "WordPiece", "vocab": vocabulary, "unk_token": unknown, "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100,
            },
        }))
    }

    /// Tokens that text is split at: control tokens, the unknown
    /// token and user-defined tokens.
    fn added_tokens(&self) -> Vec<Value> {
        let Some(GgufValue::Array(types)) = self.model.metadata_value("tokenizer.ggml.token_type") else {
            return Vec::new();
        };
        let token = |(id, content): (usize, &String)| {
            let kind = integer(types.scalar(id)?)?;
            let special = kind == CONTROL || kind == UNKNOWN || END_TEXTS.contains(&content.as_str());
            (special || kind == USER_DEFINED).then(|| {
                json!({
                    "id": id, "content": content, "special": special, "normalized": false,
                    "single_word": false, "lstrip": false, "rstrip": false,
                })
            })
        };
        self.tokens.iter().enumerate().filter_map(token).collect()
    }
}

/// Merges that lead to each token, the best score first, as `transformers` derives them.
fn merges_of_scores(tokens: &[String], scores: &[f32]) -> Vec<Value> {
    let ids: HashMap<&str, usize> = tokens.iter().enumerate().map(|(id, token)| (token.as_str(), id)).collect();
    let mut merges = Vec::new();
    for (token, score) in tokens.iter().zip(scores) {
        let splits = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
        let mut pairs: Vec<(usize, usize)> =
            splits.filter_map(|(left, right)| Some((*ids.get(left)?, *ids.get(right)?))).collect();
        pairs.sort_unstable();
        merges.extend(pairs.into_iter().map(|pair| (*score, pair)));
    }
    // Stable: equal scores keep the order of the vocabulary.
    merges.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    merges.into_iter().map(|(_, (left, right))| json!([tokens[left], tokens[right]])).collect()
}

fn value<'m>(model: &'m Model, key: &str) -> Option<&'m GgufValue> {
    model.metadata_value(&format!("tokenizer.ggml.{key}"))
}

fn text<'m>(model: &'m Model, key: &str) -> Option<&'m str> {
    value(model, key)?.as_str()
}

fn number(model: &Model, key: &str) -> Option<u64> {
    value(model, key)?.as_u64()
}

fn flag(model: &Model, key: &str) -> Option<bool> {
    match value(model, key)? {
        GgufValue::Scalar(GgufScalar::Bool(flag)) => Some(*flag),
        _ => None,
    }
}

fn strings<'m>(model: &'m Model, key: &str) -> Option<&'m [String]> {
    match value(model, key)? {
        GgufValue::Array(GgufArray::Strings(items)) => Some(items),
        _ => None,
    }
}

fn score(scores: &GgufArray, id: usize) -> Option<f32> {
    match scores.scalar(id)? {
        GgufScalar::F32(score) => Some(score),
        _ => None,
    }
}

fn integer(scalar: GgufScalar) -> Option<i64> {
    scalar.as_u64().and_then(|value| i64::try_from(value).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn merges(tokens: &[(&str, f32)]) -> Vec<String> {
        let (tokens, scores): (Vec<String>, Vec<f32>) = tokens.iter().map(|(t, s)| ((*t).to_owned(), *s)).unzip();
        let pair = |value: Value| format!("{} {}", value[0].as_str().unwrap_or("?"), value[1].as_str().unwrap_or("?"));
        merges_of_scores(&tokens, &scores).into_iter().map(pair).collect()
    }

    #[test]
    fn merges_follow_scores() {
        let tokens = [("a", 0.0), ("b", 0.0), ("ab", -2.0), ("ba", -1.0), ("aba", -3.0)];
        assert_eq!(merges(&tokens), ["b a", "a b", "a ba", "ab a"]);
    }

    #[test]
    fn the_tokenizer_of_scores_encodes_and_falls_back_to_bytes() {
        let mut tokens: Vec<(String, f32)> = vec![("<unk>".into(), 0.0)];
        tokens.extend((0..256).map(|byte| (format!("<0x{byte:02X}>"), 0.0)));
        tokens.extend(
            [("▁", -9.0), ("a", -8.0), ("b", -8.0), ("ab", -1.0), ("▁ab", -2.0)].map(|(t, s)| (t.to_owned(), s)),
        );
        let (tokens, scores): (Vec<String>, Vec<f32>) = tokens.into_iter().unzip();
        let vocabulary: Map<String, Value> = tokens.iter().cloned().zip((0..).map(|id: u32| id.into())).collect();
        let json = json!({
            "version": "1.0",
            "normalizer": { "type": "Prepend", "prepend": "▁" },
            "model": {
                "type": "BPE", "vocab": vocabulary, "merges": merges_of_scores(&tokens, &scores),
                "byte_fallback": true, "unk_token": "<unk>", "fuse_unk": true,
            },
        });
        let tokenizer = tokenizers::Tokenizer::from_bytes(json.to_string()).expect("a tokenizer");
        let encoded = tokenizer.encode("abé", false).expect("encoded");
        assert_eq!(encoded.get_tokens(), ["▁ab", "<0xC3>", "<0xA9>"]);
    }
}
