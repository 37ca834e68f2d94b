//! Sizes that settings state, once or for each layer.

use std::collections::BTreeSet;

use super::settings::{Key, Settings};
use crate::error::Error;

/// Layers.
pub const LAYERS: Key = Key { gguf: "block_count", config: &["/num_hidden_layers"] };
/// Features within feed-forward parts.
pub const INTERMEDIATE: Key = Key { gguf: "feed_forward_length", config: &["/block_ff_dim", "/intermediate_size"] };
/// Heads of keys and values. GGUF files of some architectures list those of each layer.
pub const KV_HEADS: Key = Key { gguf: "attention.head_count_kv", config: &["/num_key_value_heads"] };

/// Largest size that is read: products of two are far from overflow.
const MOST: usize = 1 << 24;

/// A positive size, if it is stated.
///
/// # Errors
/// [`Error::UnservedSetting`] when it is out of range.
pub fn size(settings: &Settings<'_>, key: Key) -> Result<Option<usize>, Error> {
    match settings.count(key).filter(|&n| n > 0) {
        Some(got) if got > MOST => Err(Error::UnservedSetting {
            name: settings.name(key),
            got: got.to_string(),
            expected: format!("at most {MOST}"),
        }),
        stated => Ok(stated),
    }
}

/// A size that is stated once, or for each layer that has one.
pub fn uniform(settings: &Settings<'_>, key: Key) -> Result<Option<usize>, Error> {
    let Some(listed) = settings.counts(key) else { return size(settings, key) };
    let sizes: BTreeSet<usize> = listed.into_iter().filter(|&n| n > 0).collect();
    match (sizes.first(), sizes.len()) {
        (None, _) => Ok(None),
        (Some(&one), 1) if one <= MOST => Ok(Some(one)),
        _ => Err(Error::UnservedSetting {
            name: settings.name(key),
            got: format!("{sizes:?}"),
            expected: format!("one number for all layers, at most {MOST}"),
        }),
    }
}
