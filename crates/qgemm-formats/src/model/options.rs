//! Options of a model reader, and the files that it reads.

/// Storage of zero points in a GPTQ checkpoint. Some files state the wrong version.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum GptqZeros {
    /// By the data of symmetric layers, whose zero points are all `2^(bits − 1)`.
    /// Else by `checkpoint_format` of the settings, or AutoRound's `packing_format`.
    /// Version 1 without either.
    #[default]
    FromConfig,
    /// Version 1: stored minus one.
    LessOne,
    /// Version 2: stored unchanged.
    AsIs,
}

/// Options of a model reader.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelOptions {
    /// Storage of GPTQ zero points.
    pub gptq_zeros: GptqZeros,
}

/// File contents and the name in error messages: a path, or a word.
#[derive(Clone, Debug)]
pub struct NamedFile<T> {
    /// Path or word.
    pub name: String,
    /// Contents.
    pub contents: T,
}
