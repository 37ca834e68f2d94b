//! Model files: reads the quantized layers of GGUF and safetensors
//! files as [`HostWeight`]s.
//!
//! [`Model`] works on bytes that the caller has mapped or read. Opening reads headers
//! only. [`Model::weight`] reads a layer's bytes. Safetensors layers: GPTQ, AWQ, MLX, bitsandbytes,
//! torchao, INT8 per channel, FP8, MXFP4, NVFP4, stacks of these, and plain f32, f16 and bf16
//! matrices. Layers of other formats become errors that name the format.

mod awq;
mod bitsandbytes;
mod centered;
mod eight_bit;
mod exact;
mod experts;
mod four_bit;
pub mod gguf;
mod gguf_converted;
mod gguf_nvfp4;
mod gptq;
mod grouped;
mod groups;
mod json;
mod layer;
mod mlx;
mod numbers;
mod options;
mod overrides;
mod pack_quantized;
mod raw;
mod recognise;
mod scales;
mod settings;
mod shards;
mod stack;
mod stated;
mod torchao;
mod unserved;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::desc::{Encoding, Format};
use crate::dtype::DType;
use crate::error::FormatError;
use crate::names::nearest;
pub use crate::names::printable;
use crate::weight::{HostWeight, SharedBytes};
use gguf_converted::{Conversion, ConvertedLayer, Q2_0};
pub use json::strict_json;
use layer::{BlockLayer, Layer, erase, stack_size};
pub use numbers::{NumberTensor, NumberType};
pub use options::{GptqZeros, ModelOptions, NamedFile};
use settings::Settings;

/// Kind of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub enum TensorKind {
    /// A quantized weight.
    Quantized(Format),
    /// Plain numbers. A matrix is also a weight.
    Dense(DType),
    /// Any other tensor: the name of its type, or the error of its layer.
    Opaque(String),
}

/// Entry of a model's table of contents.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct TensorInfo {
    /// Name. A quantized layer of several tensors ends in `.weight`.
    pub name: String,
    /// Kind.
    pub kind: TensorKind,
    /// Type in the file, by its own name. Empty for layers of several tensors.
    pub type_name: String,
    /// Dimensions, outermost first: `[N, K]` of weights, `[matrices, N, K]` of stacks.
    pub shape: Vec<usize>,
    /// Bytes in the file, scales included.
    pub bytes: usize,
}

/// Tensor of plain numbers.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DenseTensor {
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Element type.
    pub dtype: DType,
    /// The elements, little-endian.
    pub bytes: SharedBytes,
}

impl DenseTensor {
    /// Converts the elements to f32.
    pub fn to_f32(&self) -> Vec<f32> {
        self.dtype.decode(&self.bytes)
    }

    /// `1 + v` of each element in f32: gamma of a norm whose weight is stored as its
    /// distance from 1, as in Gemma's safetensors.
    ///
    /// Elements are widened first and the sum is rounded once to f32, as where a
    /// model computes `1 + weight.float()` at run time. GGUF files of Gemma store
    /// gamma itself.
    pub fn one_plus(&self) -> Self {
        let values: Vec<f32> = self.to_f32().into_iter().map(|v| 1.0 + v).collect();
        Self { shape: self.shape.clone(), dtype: DType::F32, bytes: DType::F32.encode(&values).into() }
    }
}

/// Origin of a tensor's contents.
#[derive(Clone, Debug)]
enum Source {
    Layer(Arc<dyn Layer>),
    Dense(DenseTensor),
    Numbers(NumberTensor),
    Opaque,
    Broken(FormatError),
}

/// Model of one or several files.
#[derive(Clone, Debug)]
pub struct Model {
    tensors: Vec<TensorInfo>,
    sources: Vec<Source>,
    by_name: HashMap<String, usize>,
    metadata: Vec<(String, gguf::GgufValue)>,
    /// Tensors of unopened shards, each with its file.
    others: BTreeMap<String, String>,
}

impl Model {
    /// Opens a GGUF or safetensors file, told apart by the first bytes.
    ///
    /// `config` is the text of `config.json` or `quantize_config.json`, for safetensors
    /// files that need it. [`Model::from_files`] takes several settings files.
    ///
    /// # Errors
    /// [`FormatError::BadFile`], [`FormatError::UnsupportedFile`] and the errors
    /// of [`gguf::GgufFile::read`]. An invalid layer does not fail here
    /// but in [`Model::weight`].
    pub fn from_bytes(bytes: SharedBytes, config: Option<&str>, options: ModelOptions) -> Result<Self, FormatError> {
        Self::from_shards(&[bytes], config, options)
    }

    /// Opens a checkpoint of several safetensors files, or all parts of a split GGUF file.
    ///
    /// # Errors
    /// As [`Model::from_bytes`]. Also when two shards have the same tensor, or files
    /// are not the parts of one model.
    pub fn from_shards(
        shards: &[SharedBytes],
        config: Option<&str>,
        options: ModelOptions,
    ) -> Result<Self, FormatError> {
        let name = |i: usize| if shards.len() == 1 { "model file".into() } else { format!("model file {}", i + 1) };
        let shards = shards.iter().enumerate().map(|(i, bytes)| NamedFile { name: name(i), contents: bytes.clone() });
        let config = config.map(|text| NamedFile { name: "model configuration".into(), contents: text });
        Self::from_files(&shards.collect::<Vec<_>>(), config.as_slice(), options)
    }

    /// [`Model::from_shards`] with file names for errors, and all settings files.
    ///
    /// `settings` are the files that may state a quantization: `config.json`,
    /// `quantize_config.json`, `quant_config.json`, `quantization_config.json` and
    /// `hf_quant_config.json`. A layer with contradicting settings is refused.
    ///
    /// # Errors
    /// As [`Model::from_shards`].
    pub fn from_files(
        shards: &[NamedFile<SharedBytes>],
        settings: &[NamedFile<&str>],
        options: ModelOptions,
    ) -> Result<Self, FormatError> {
        let _span = tracing::info_span!("open_model", shards = shards.len()).entered();
        let mut model = match shards {
            [first, ..] if shards.iter().all(|shard| shard.contents.starts_with(gguf::MAGIC)) => {
                gguf::split::read(shards).and_then(|file| Self::from_gguf(file).map_err(|e| e.in_file(&first.name)))?
            }
            _ => {
                if let Some(other) = shards.iter().find(|shard| shard.contents.get(8) != Some(&b'{')) {
                    return Err(FormatError::BadFile {
                        file: other.name.clone(),
                        what: "is not safetensors (which has a JSON header at byte 8), nor are all files GGUF".into(),
                    });
                }
                let (tensors, metadata) = raw::read(shards)?;
                let settings = Settings::parse(settings)?.with_metadata(metadata);
                Self::from_safetensors(tensors, &settings, &options)?
            }
        };
        model.by_name = model.tensors.iter().enumerate().map(|(i, tensor)| (tensor.name.clone(), i)).collect();
        tracing::debug!(tensors = model.tensors.len(), "opened");
        Ok(model)
    }

    /// Table of contents, in GGUF order, else by name.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// Metadata of a GGUF file, in file order. Empty for safetensors.
    pub fn metadata(&self) -> &[(String, gguf::GgufValue)] {
        &self.metadata
    }

    /// Metadata value with this key.
    pub fn metadata_value(&self, key: &str) -> Option<&gguf::GgufValue> {
        self.metadata.iter().find(|(name, _)| name == key).map(|(_, value)| value)
    }

    /// Entry called `name` or `name.weight`.
    ///
    /// # Errors
    /// [`FormatError::NoSuchTensor`], with the most similar name;
    /// [`FormatError::InOtherShard`].
    pub fn info(&self, name: &str) -> Result<&TensorInfo, FormatError> {
        Ok(&self.tensors[self.find(name)?])
    }

    /// Whether there is an entry called `name` or `name.weight`.
    ///
    /// Unlike [`Model::info`], it searches for no similar name.
    pub fn has(&self, name: &str) -> bool {
        self.by_name.contains_key(name) || self.by_name.contains_key(&format!("{name}.weight"))
    }

    /// Loads the weight called `name` or `name.weight`. Checks that its scales are finite.
    ///
    /// # Errors
    /// [`FormatError::NoSuchTensor`], [`FormatError::NonFiniteScale`], and
    /// errors of an invalid layer. [`FormatError::UnsupportedFile`] for stacks
    /// (see [`Model::stacked_weight`]), for tensors that are no matrices and
    /// for types without a format.
    pub fn weight(&self, name: &str) -> Result<HostWeight, FormatError> {
        let index = self.find(name)?;
        match self.tensors[index].shape[..] {
            [_, _] | [1, _, _] => self.load(index, 0),
            ref shape if shape.len() > 2 && matches!(self.sources[index], Source::Layer(_) | Source::Dense(_)) => {
                Err(raw::unsupported(
                    &self.tensors[index].name,
                    format!("is a stack of {} matrices {shape:?}: load them one by one", stack_size(shape)),
                ))
            }
            _ => self.load(index, 0),
        }
    }

    /// Loads matrix `matrix` (an expert) of the stack called `name`, with the
    /// checks of [`Model::weight`].
    ///
    /// A stack is `[E, N, K]` and never transposed. Llama 4 stores `[E, K, N]`. Scales
    /// usually reveal that: then the stack is an error. A single scale reveals nothing:
    /// then N and K are exchanged in the result.
    ///
    /// # Errors
    /// As [`Model::weight`], and [`FormatError::BadFile`] when the
    /// stack has no such matrix.
    pub fn stacked_weight(&self, name: &str, matrix: usize) -> Result<HostWeight, FormatError> {
        let index = self.find(name)?;
        self.load(index, matrix)
    }

    /// Dense tensor called `name` or `name.weight`.
    ///
    /// # Errors
    /// [`FormatError::NoSuchTensor`]. [`FormatError::UnsupportedFile`] when it
    /// is not f32, f16 or bf16.
    pub fn dense(&self, name: &str) -> Result<DenseTensor, FormatError> {
        let index = self.find(name)?;
        match &self.sources[index] {
            Source::Dense(tensor) => Ok(tensor.clone()),
            Source::Layer(layer) => Err(raw::unsupported(
                &self.tensors[index].name,
                format!("is quantized ({}): load it as a weight", layer.format()),
            )),
            Source::Numbers(_) | Source::Opaque => Err(self.opaque(index)),
            Source::Broken(error) => Err(error.clone()),
        }
    }

    /// Blocks of the quantized tensor called `name` or `name.weight`. A stack has the
    /// blocks of all its matrices.
    ///
    /// A GGUF tensor's bytes are returned unchanged; scales are not checked.
    ///
    /// # Errors
    /// [`FormatError::NoSuchTensor`], and errors of an invalid layer.
    /// [`FormatError::UnsupportedFile`] when the tensor is not quantized, or its
    /// weights have more than blocks.
    pub fn blocks(&self, name: &str) -> Result<SharedBytes, FormatError> {
        let index = self.find(name)?;
        match &self.sources[index] {
            Source::Layer(layer) => layer.blocks(),
            Source::Dense(_) => Err(raw::unsupported(&self.tensors[index].name, "is not quantized: read it as it is")),
            Source::Numbers(_) | Source::Opaque => Err(self.opaque(index)),
            Source::Broken(error) => Err(error.clone()),
        }
    }

    /// Integer or f64 tensor called `name`, for copying without loss.
    /// `None` for every other tensor.
    ///
    /// Such tensors are [`TensorKind::Opaque`], neither weights nor [`Model::dense`].
    ///
    /// # Errors
    /// [`FormatError::NoSuchTensor`].
    pub fn numbers(&self, name: &str) -> Result<Option<&NumberTensor>, FormatError> {
        match &self.sources[self.find(name)?] {
            Source::Numbers(tensor) => Ok(Some(tensor)),
            _ => Ok(None),
        }
    }

    fn load(&self, index: usize, matrix: usize) -> Result<HostWeight, FormatError> {
        let info = &self.tensors[index];
        let _span = tracing::debug_span!("load_weight", tensor = %info.name, matrix).entered();
        let stack = if info.shape.len() < 2 { 0 } else { stack_size(&info.shape) };
        let in_stack = || {
            if stack == 0 {
                return Err(raw::unsupported(&info.name, format!("has shape {:?}: expected a matrix", info.shape)));
            }
            if matrix >= stack {
                return Err(raw::bad(
                    &info.name,
                    format!("has {stack} matrices: expected a smaller index than {matrix}"),
                ));
            }
            Ok(())
        };
        let weight = match &self.sources[index] {
            Source::Layer(layer) => in_stack().and_then(|()| layer.weight(matrix))?,
            Source::Dense(tensor) => {
                in_stack()?;
                let format = plain_format(tensor.dtype)?;
                BlockLayer { format, shape: tensor.shape.clone(), bytes: tensor.bytes.clone() }.weight(matrix)?
            }
            Source::Numbers(_) | Source::Opaque => return Err(self.opaque(index)),
            Source::Broken(error) => return Err(error.clone()),
        };
        scales::check(&info.name, &weight)?;
        Ok(weight)
    }

    fn opaque(&self, index: usize) -> FormatError {
        let info = &self.tensors[index];
        let kind = match &info.kind {
            TensorKind::Opaque(kind) => kind.as_str(),
            TensorKind::Quantized(_) | TensorKind::Dense(_) => "unknown",
        };
        raw::unsupported(&info.name, format!("is {kind}, for which there is no weight format"))
    }

    fn find(&self, name: &str) -> Result<usize, FormatError> {
        let found = self.by_name.get(name).or_else(|| self.by_name.get(&format!("{name}.weight")));
        found.copied().ok_or_else(|| self.no_such_tensor(name))
    }

    /// Whether the tensor exists, by the rule of [`Model::find`], or
    /// is in an unopened shard.
    fn knows(&self, name: &str) -> bool {
        let is_known = |name: &str| self.by_name.contains_key(name) || self.others.contains_key(name);
        is_known(name) || is_known(&format!("{name}.weight"))
    }

    /// Error of an unknown name.
    fn no_such_tensor(&self, name: &str) -> FormatError {
        let weight = format!("{name}.weight");
        match [name, &weight].into_iter().find_map(|name| self.others.get_key_value(name)) {
            Some((name, shard)) => FormatError::InOtherShard { name: name.clone(), shard: shard.clone() },
            None => FormatError::NoSuchTensor {
                name: name.to_owned(),
                near: nearest(name, self.tensors.iter().map(|tensor| tensor.name.as_str())),
            },
        }
    }

    fn from_gguf(mut file: gguf::GgufFile) -> Result<Self, FormatError> {
        let mut model = Self { metadata: file.metadata, ..Self::empty() };
        let mut scales = gguf_nvfp4::take_scales(&mut file.tensors);
        let q2_0 = Q2_0::of(&file.tensors, file.alignment);
        for tensor in file.tensors {
            let type_name = tensor.type_name();
            if let Some(layer) = converted(&tensor, &mut scales, &q2_0) {
                let size = layer.as_ref().map_or(tensor.bytes.len(), |layer| layer.bytes());
                let source = layer.map_or_else(Source::Broken, Source::Layer);
                model.push(tensor.name, tensor.shape, size, &type_name, source)?;
                continue;
            }
            let gguf::GgufTensor { name, shape, format, bytes, .. } = tensor;
            let source = match format.map(|format| (format, format.encoding)) {
                None => other(&type_name, &shape, &bytes),
                Some((_, Encoding::Plain(dtype))) => {
                    Source::Dense(DenseTensor { shape: shape.clone(), dtype, bytes: bytes.clone() })
                }
                Some((format, _)) => {
                    Source::Layer(Arc::new(BlockLayer { format, shape: shape.clone(), bytes: bytes.clone() }))
                }
            };
            model.push(name, shape, bytes.len(), &type_name, source)?;
        }
        Ok(model)
    }

    fn from_safetensors(
        mut tensors: raw::RawTensors,
        settings: &Settings,
        options: &ModelOptions,
    ) -> Result<Self, FormatError> {
        let mut model = Self::empty();
        for (name, found) in recognise::take_layers(&mut tensors, settings, options) {
            match found {
                Ok(layer) => model.push(name, layer.shape(), layer.bytes(), "", Source::Layer(layer))?,
                Err(error) => model.push(name, Vec::new(), 0, "", Source::Broken(error))?,
            }
        }
        for (name, tensor) in tensors {
            let size = tensor.bytes.len();
            let type_name = format!("{:?}", tensor.dtype);
            let numbers = other(&type_name, &tensor.shape, &tensor.bytes);
            let source = match tensor.float_type() {
                Some(dtype) => Source::Dense(DenseTensor { shape: tensor.shape.clone(), dtype, bytes: tensor.bytes }),
                None => numbers,
            };
            model.push(name, tensor.shape, size, &type_name, source)?;
        }
        model.sort();
        Ok(model)
    }

    fn empty() -> Self {
        Self {
            tensors: Vec::new(),
            sources: Vec::new(),
            by_name: HashMap::new(),
            metadata: Vec::new(),
            others: BTreeMap::new(),
        }
    }

    /// Adds a tensor.
    fn push(
        &mut self,
        name: String,
        shape: Vec<usize>,
        bytes: usize,
        type_name: &str,
        source: Source,
    ) -> Result<(), FormatError> {
        let kind = match &source {
            Source::Layer(layer) => TensorKind::Quantized(layer.format()),
            Source::Dense(tensor) => TensorKind::Dense(tensor.dtype),
            Source::Numbers(_) | Source::Opaque => TensorKind::Opaque(type_name.to_owned()),
            Source::Broken(error) => TensorKind::Opaque(error.to_string()),
        };
        if self.by_name.insert(name.clone(), self.tensors.len()).is_some() {
            return Err(raw::bad(&name, "exists both quantized and unquantized"));
        }
        self.tensors.push(TensorInfo { name, kind, type_name: type_name.to_owned(), shape, bytes });
        self.sources.push(source);
        Ok(())
    }

    fn sort(&mut self) {
        let mut pairs: Vec<_> = self.tensors.drain(..).zip(self.sources.drain(..)).collect();
        pairs.sort_by(|(a, _), (b, _)| a.name.cmp(&b.name));
        (self.tensors, self.sources) = pairs.into_iter().unzip();
    }
}

/// Layer of a GGUF type whose blocks are not those of a format. `None` for other types.
fn converted(
    tensor: &gguf::GgufTensor,
    nvfp4_scales: &mut HashMap<String, gguf::GgufTensor>,
    q2_0: &Q2_0,
) -> Option<Result<Arc<dyn Layer>, FormatError>> {
    match Conversion::of(tensor.ggml_type) {
        Some(conversion) => Some(erase(ConvertedLayer::new(tensor, conversion))),
        None if tensor.ggml_type == gguf_nvfp4::GGML_TYPE => {
            let scale = nvfp4_scales.remove(&tensor.name);
            Some(erase(gguf_nvfp4::GgufNvfp4Layer::new(tensor.clone(), scale)))
        }
        None if Q2_0::is(tensor) => Some(erase(q2_0.layer(tensor))),
        None => None,
    }
}

/// Tensor that is neither a layer nor dense.
fn other(type_name: &str, shape: &[usize], bytes: &SharedBytes) -> Source {
    NumberTensor::new(type_name, shape, bytes).map_or(Source::Opaque, Source::Numbers)
}

/// Weight format of plain numbers.
fn plain_format(dtype: DType) -> Result<Format, FormatError> {
    dtype.name().parse()
}
