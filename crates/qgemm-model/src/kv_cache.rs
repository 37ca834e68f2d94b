//! The paged KV cache of all layers.

use qgemm_api::{Attention, AttentionArgs, Buffer, Context, DType, Keys, KvAppend, KvAppendArgs, KvFormat};

use crate::error::Error;
use crate::hyperparameters::Hyperparameters;

/// Features that share a scale in Q8_0 and Q4_0.
const BLOCK: usize = 32;

/// Sizes of a paged cache.
#[derive(Clone, Copy, Debug)]
pub struct CacheSize {
    /// Pages.
    pub pages: usize,
    /// Tokens of a page.
    pub page_size: usize,
    /// Pages that one session may have.
    pub width: usize,
    /// Format of keys and values.
    pub format: KvFormat,
}

/// Keys and values of all layers, `[pages, page_size, kv_heads, head_dim]` each.
pub struct KvCache {
    size: CacheSize,
    layers: Vec<LayerCache>,
    /// Factors of E4M3, all 1.
    factors: Option<Buffer>,
}

/// Keys and values of a layer.
struct LayerCache {
    k: Buffer,
    v: Buffer,
    /// Scales of K and V, for formats that have some.
    scales: Option<[Buffer; 2]>,
}

impl KvCache {
    /// Allocates the cache.
    ///
    /// # Errors
    /// A device error such as exhausted memory.
    pub fn new(ctx: &Context, numbers: &Hyperparameters, size: CacheSize) -> Result<Self, Error> {
        let CacheSize { pages, page_size, format, .. } = size;
        // No device has as many bytes as the largest number.
        let tokens = pages.saturating_mul(page_size);
        let elements = tokens.saturating_mul(numbers.kv_heads).saturating_mul(numbers.head_dim);
        let layer = || {
            let plane =
                || Ok::<_, Error>(ctx.allocate((elements / 8).saturating_mul(format.bits()))?.typed(format.element()));
            let scales = || ctx.allocate_elements(DType::F16, elements / BLOCK);
            Ok::<_, Error>(LayerCache {
                k: plane()?,
                v: plane()?,
                scales: if format.has_scales() { Some([scales()?, scales()?]) } else { None },
            })
        };
        let factors = format.has_factors().then(|| ctx.upload(&vec![1.0f32; numbers.kv_heads])).transpose()?;
        Ok(Self { size, layers: (0..numbers.layers).map(|_| layer()).collect::<Result<_, Error>>()?, factors })
    }

    /// Its sizes.
    pub fn size(&self) -> CacheSize {
        self.size
    }

    /// Keys of sessions with at most `most` tokens.
    pub fn keys(&self, most: usize) -> Keys {
        let CacheSize { pages, page_size, width, .. } = self.size;
        Keys::paged(pages, page_size, width).most(most)
    }

    /// States the cache's format.
    pub fn describe_append(&self, append: KvAppend) -> KvAppend {
        append.kv_format(self.size.format)
    }

    /// States the cache's format.
    pub fn describe_attention(&self, attention: Attention) -> Attention {
        attention.kv_format(self.size.format)
    }

    /// Arguments that append new keys and values to a layer.
    pub fn append_args<'a>(&'a mut self, layer: usize, new_k: &'a Buffer, new_v: &'a Buffer) -> KvAppendArgs<'a> {
        let LayerCache { k, v, scales } = &mut self.layers[layer];
        let mut args = KvAppendArgs::new(new_k, new_v, k, v);
        if let Some([k, v]) = scales {
            (args.k_scales, args.v_scales) = (Some(k.view_mut()), Some(v.view_mut()));
        }
        let factors = self.factors.as_ref().map(Buffer::view);
        (args.k_factors, args.v_factors) = (factors, factors);
        args
    }

    /// Arguments of attention to the keys of a layer.
    pub fn attention_args<'a>(&'a self, layer: usize, q: &'a Buffer, d: &'a mut Buffer) -> AttentionArgs<'a> {
        let LayerCache { k, v, scales } = &self.layers[layer];
        let mut args = AttentionArgs::new(q, k, v, d);
        if let Some([k, v]) = scales {
            (args.k_scales, args.v_scales) = (Some(k.view()), Some(v.view()));
        }
        let factors = self.factors.as_ref().map(Buffer::view);
        (args.k_factors, args.v_factors) = (factors, factors);
        args
    }
}
