//! Pre-tokenizers of byte-level BPE, by the names of `tokenizer.ggml.pre`.

use serde_json::{Value, json};

/// How text is split before merges.
#[derive(Debug)]
pub struct PreTokenizer {
    /// Names in GGUF files.
    names: &'static [&'static str],
    split: Split,
    /// Whether a piece that is a token needs no merges.
    pub ignore_merges: bool,
    /// Whether texts begin with the beginning-of-text token, unless the file states it.
    pub adds_bos: bool,
}

/// The split itself.
#[derive(Debug)]
enum Split {
    /// GPT-2's pattern, after digits are separated if the flag is set.
    Gpt2 { digits: bool },
    /// A regular expression.
    Pattern(&'static str),
}

/// Pre-tokenizers that are built.
static SERVED: [PreTokenizer; 7] = [
    PreTokenizer {
        names: &["gpt-2", "gpt2", "mpt"],
        split: Split::Gpt2 { digits: false },
        ignore_merges: false,
        adds_bos: false,
    },
    PreTokenizer {
        names: &["smollm", "starcoder", "refact", "command-r"],
        split: Split::Gpt2 { digits: true },
        ignore_merges: false,
        adds_bos: false,
    },
    PreTokenizer {
        names: &["llama-bpe", "llama3", "llama-v3", "lfm2", "pixtral"],
        split: Split::Pattern(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        ignore_merges: true,
        adds_bos: true,
    },
    PreTokenizer {
        names: &["qwen2", "deepseek-r1-qwen"],
        split: Split::Pattern(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        ignore_merges: false,
        adds_bos: false,
    },
    PreTokenizer {
        names: &["qwen35"],
        split: Split::Pattern(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        ignore_merges: false,
        adds_bos: false,
    },
    PreTokenizer {
        names: &["gpt-4o", "llama4"],
        split: Split::Pattern(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        ignore_merges: false,
        adds_bos: false,
    },
    PreTokenizer {
        names: &["tekken"],
        split: Split::Pattern(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        ignore_merges: true,
        adds_bos: true,
    },
];

impl PreTokenizer {
    /// The pre-tokenizer called `name`.
    pub fn named(name: &str) -> Option<&'static Self> {
        SERVED.iter().find(|pre| pre.names.contains(&name))
    }

    /// Names that are known.
    pub fn served() -> Vec<&'static str> {
        SERVED.iter().flat_map(|pre| pre.names).copied().collect()
    }

    /// As `tokenizer.json` states it.
    pub fn json(&self) -> Value {
        let bytes = |use_regex: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex });
        let steps = match self.split {
            Split::Gpt2 { digits: false } => vec![bytes(true)],
            Split::Gpt2 { digits: true } => vec![json!({ "type": "Digits", "individual_digits": true }), bytes(true)],
            Split::Pattern(pattern) => {
                let split = json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false });
                vec![split, bytes(false)]
            }
        };
        json!({ "type": "Sequence", "pretokenizers": steps })
    }
}
