//! Model files: GGUF and safetensors, and the quantized layers in them as [`HostWeight`]s.
//!
//! [`Model`] works on bytes that the caller has mapped or read. Opening looks at headers only; a layer's bytes
//! are touched when [`Model::weight`] loads it. Recognised in safetensors files: GPTQ, AWQ, INT8 per channel,
//! FP8, MXFP4 and NVFP4 layers, stacks of these, and plain f32, f16 and bf16 matrices. Layers of other formats are
//! found, too, as errors that name the format.

mod awq;
mod eight_bit;
mod experts;
mod four_bit;
pub mod gguf;
mod gptq;
mod grouped;
mod groups;
mod json;
mod layer;
mod numbers;
mod overrides;
mod raw;
mod recognise;
mod scales;
mod settings;
mod shards;
mod stack;
mod stated;
mod unserved;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::desc::{Encoding, Format};
use crate::dtype::DType;
use crate::error::FormatError;
use crate::names::nearest;
pub use crate::names::printable;
use crate::weight::{HostWeight, SharedBytes};
pub use json::strict_json;
use layer::{BlockLayer, Layer, stack_size};
pub use numbers::{NumberTensor, NumberType};
use settings::Settings;

/// How a GPTQ checkpoint stores its zero points. Some files state the wrong version.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum GptqZeros {
    /// As a symmetric layer's zero points show, which are all `2^(bits − 1)`. Of other layers as `checkpoint_format` of
    /// the settings says, or `packing_format` of AutoRound's; version 1 where both are absent.
    #[default]
    FromConfig,
    /// Less one: version 1.
    LessOne,
    /// As they are: version 2.
    AsIs,
}

/// Choices in reading a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelOptions {
    /// How GPTQ zero points are stored.
    pub gptq_zeros: GptqZeros,
}

/// A file's contents and what errors call it: its path, or a word for it.
#[derive(Clone, Debug)]
pub struct NamedFile<T> {
    /// The path or word.
    pub name: String,
    /// The contents.
    pub contents: T,
}

/// What a tensor of a model is.
#[derive(Clone, Debug, PartialEq)]
pub enum TensorKind {
    /// A quantized weight.
    Quantized(Format),
    /// Plain numbers; with two dimensions also a weight.
    Dense(DType),
    /// Neither: the type's name, or why the layer cannot be loaded.
    Opaque(String),
}

/// One line of a model's table of contents.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct TensorInfo {
    /// Name; that of a quantized layer made of several tensors ends in `.weight`.
    pub name: String,
    /// What it is.
    pub kind: TensorKind,
    /// Dimensions, outermost first: `[N, K]` of weights, `[matrices, N, K]` of stacks.
    pub shape: Vec<usize>,
    /// Bytes in the file, scales included.
    pub bytes: usize,
}

/// A tensor of plain numbers.
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
    /// The elements as f32.
    pub fn to_f32(&self) -> Vec<f32> {
        self.dtype.decode(&self.bytes)
    }
}

/// Where a tensor's contents come from.
#[derive(Clone, Debug)]
enum Source {
    Layer(Arc<dyn Layer>),
    Dense(DenseTensor),
    Numbers(NumberTensor),
    Opaque,
    Broken(FormatError),
}

/// A model file, or several that make one model.
#[derive(Clone, Debug)]
pub struct Model {
    tensors: Vec<TensorInfo>,
    sources: Vec<Source>,
    by_name: HashMap<String, usize>,
    metadata: Vec<(String, gguf::GgufValue)>,
    /// Tensors of the same checkpoint in files that were not opened, and these files.
    others: BTreeMap<String, String>,
}

impl Model {
    /// Opens the file that `bytes` holds, GGUF or safetensors by its first bytes. `config` is the text of the
    /// checkpoint's `config.json` or `quantize_config.json`, for safetensors files that need one. Where there are
    /// several, [`Model::from_files`] takes them.
    ///
    /// # Errors
    /// [`FormatError::BadFile`], [`FormatError::UnsupportedFile`] and others that [`gguf::GgufFile::read`] names.
    /// Layers that cannot be loaded do not fail here but in [`Model::weight`].
    pub fn from_bytes(bytes: SharedBytes, config: Option<&str>, options: ModelOptions) -> Result<Self, FormatError> {
        Self::from_shards(&[bytes], config, options)
    }

    /// Opens a checkpoint that is split over several safetensors files.
    ///
    /// # Errors
    /// As [`Model::from_bytes`]; also when a tensor is in two shards, or there are several files and one is GGUF.
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

    /// [`Model::from_shards`] of files whose names errors state. `settings` are all files of the checkpoint that may say
    /// how it is quantized: `config.json`, `quantize_config.json`, `quant_config.json`, `quantization_config.json` and
    /// `hf_quant_config.json`. A layer about which two of them disagree is refused.
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
            [file] if file.contents.starts_with(gguf::MAGIC) => {
                let read = gguf::GgufFile::read(&file.contents).and_then(Self::from_gguf);
                read.map_err(|error| error.in_file(&file.name))?
            }
            _ => {
                if let Some(other) = shards.iter().find(|shard| shard.contents.get(8) != Some(&b'{')) {
                    return Err(FormatError::BadFile {
                        file: other.name.clone(),
                        what: "is not safetensors (which has a JSON header at byte 8), nor a single GGUF file".into(),
                    });
                }
                Self::from_safetensors(raw::read(shards)?, &Settings::parse(settings)?, &options)?
            }
        };
        model.by_name = model.tensors.iter().enumerate().map(|(i, tensor)| (tensor.name.clone(), i)).collect();
        tracing::debug!(tensors = model.tensors.len(), "opened");
        Ok(model)
    }

    /// The table of contents: in the order of a GGUF file, else by name.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// Metadata of a GGUF file, in its order; empty for safetensors.
    pub fn metadata(&self) -> &[(String, gguf::GgufValue)] {
        &self.metadata
    }

    /// The entry called `name` or `name.weight`.
    ///
    /// # Errors
    /// [`FormatError::NoSuchTensor`], with the most similar name there is; [`FormatError::InOtherShard`].
    pub fn info(&self, name: &str) -> Result<&TensorInfo, FormatError> {
        Ok(&self.tensors[self.find(name)?])
    }

    /// Loads the weight called `name` or `name.weight`, after checking that all its scales are finite.
    ///
    /// # Errors
    /// [`FormatError::NoSuchTensor`], [`FormatError::NonFiniteScale`]; [`FormatError::UnsupportedFile`] for stacks
    /// (see [`Model::stacked_weight`]), for tensors that are no matrices and for types without a format; whatever
    /// is wrong with a layer that does not fit together.
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

    /// Loads matrix `matrix` of the stack called `name` (an expert of a mixture), as [`Model::weight`] does.
    ///
    /// A stack is `[E, N, K]`, as its shape says, and never turned. Llama 4 stores `[E, K, N]`: a stack whose scales show that
    /// is an error, and one in whose file nothing shows it, as with one scale for all, has N and K exchanged.
    ///
    /// # Errors
    /// As [`Model::weight`], and [`FormatError::BadFile`] when the stack has no such matrix.
    pub fn stacked_weight(&self, name: &str, matrix: usize) -> Result<HostWeight, FormatError> {
        let index = self.find(name)?;
        self.load(index, matrix)
    }

    /// The tensor of plain numbers called `name` or `name.weight`.
    ///
    /// # Errors
    /// [`FormatError::NoSuchTensor`]; [`FormatError::UnsupportedFile`] when it is not f32, f16 or bf16.
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

    /// The blocks of the quantized tensor called `name` or `name.weight`, of a stack those of all its matrices: of a GGUF file
    /// the tensor's bytes as they are, whatever their scales.
    ///
    /// # Errors
    /// [`FormatError::NoSuchTensor`]; [`FormatError::UnsupportedFile`] when it is not quantized, or blocks are not all that there
    /// is to its weights; whatever is wrong with the layer.
    pub fn blocks(&self, name: &str) -> Result<SharedBytes, FormatError> {
        let index = self.find(name)?;
        match &self.sources[index] {
            Source::Layer(layer) => layer.blocks(),
            Source::Dense(_) => Err(raw::unsupported(&self.tensors[index].name, "is not quantized: read it as it is")),
            Source::Numbers(_) | Source::Opaque => Err(self.opaque(index)),
            Source::Broken(error) => Err(error.clone()),
        }
    }

    /// The tensor called `name`, where it is one of integers or of f64, which are neither weights nor [`Model::dense`]:
    /// [`TensorKind::Opaque`], but copied without loss. `None` for every other tensor.
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
                return Err(raw::bad(&info.name, format!("has {stack} matrices: there is no number {matrix}")));
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

    /// Whether there is a tensor of that name, as [`Model::find`] looks for it, or in a shard that was not opened.
    fn knows(&self, name: &str) -> bool {
        let is_known = |name: &str| self.by_name.contains_key(name) || self.others.contains_key(name);
        is_known(name) || is_known(&format!("{name}.weight"))
    }

    /// The error of a name that there is no tensor of.
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

    fn from_gguf(file: gguf::GgufFile) -> Result<Self, FormatError> {
        let mut model = Self { metadata: file.metadata, ..Self::empty() };
        for tensor in file.tensors {
            let type_name = tensor.type_name();
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

    /// Adds a tensor; `type_name` is shown for opaque ones.
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
            return Err(raw::bad(&name, "is there both quantized and not"));
        }
        self.tensors.push(TensorInfo { name, kind, shape, bytes });
        self.sources.push(source);
        Ok(())
    }

    fn sort(&mut self) {
        let mut pairs: Vec<_> = self.tensors.drain(..).zip(self.sources.drain(..)).collect();
        pairs.sort_by(|(a, _), (b, _)| a.name.cmp(&b.name));
        (self.tensors, self.sources) = pairs.into_iter().unzip();
    }
}

/// A tensor that is neither a layer nor dense.
fn other(type_name: &str, shape: &[usize], bytes: &SharedBytes) -> Source {
    NumberTensor::new(type_name, shape, bytes).map_or(Source::Opaque, Source::Numbers)
}

/// The weight format of plain numbers.
fn plain_format(dtype: DType) -> Result<Format, FormatError> {
    dtype.name().parse()
}
