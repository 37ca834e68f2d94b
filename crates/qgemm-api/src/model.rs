//! Model files and checkpoint folders: opening and reading.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{ErrorKind, Read as _};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use qgemm_formats::model::{Model, ModelOptions, NamedFile, strict_json};
use qgemm_formats::packed_file::PackedWeight;
use qgemm_formats::{FormatError, SharedBytes};
use qgemm_hal::{MappedFile, check_regular};
use serde::Deserialize;

use crate::error::Error;

/// Opens a model: a GGUF or safetensors file, a shard index (`*.index.json`), or
/// a folder with one of them.
///
/// Any part of a split GGUF file (`…-00001-of-0000N.gguf`) stands for all of
/// them, which lie in the same folder.
///
/// Files are memory-mapped: a tensor's bytes are read when it is loaded.
///
/// A mapped file must not change. If another process truncates it, reading beyond the
/// new end kills this process (`SIGBUS`); if it is written to, weights change. Renaming
/// another file over it is safe. For files that others write to, use [`read_model`].
///
/// A shard can be opened alone. By the index beside it, errors name the shard with
/// a missing tensor. Layers with tensors in several shards are refused then.
///
/// Safetensors files take quantization settings from `config.json` (also below
/// `text_config` and similar keys), `quantize_config.json`, `quant_config.json`,
/// `quantization_config.json` and `hf_quant_config.json` in the same folder.
/// A layer with contradicting settings is refused on loading.
///
/// # Errors
/// When a file cannot be opened or is invalid, or a folder does
/// not have exactly one model.
pub fn open_model(path: impl AsRef<Path>) -> Result<Model, Error> {
    open_model_with(path, ModelOptions::default())
}

/// [`open_model`] with options.
///
/// # Errors
/// As [`open_model`].
pub fn open_model_with(path: impl AsRef<Path>, options: ModelOptions) -> Result<Model, Error> {
    open(path.as_ref(), options, |file| Ok(SharedBytes::new(Arc::new(MappedFile::open(file)?))))
}

/// [`open_model_with`] that reads the files into memory. Later changes of
/// the files have no effect.
///
/// # Errors
/// As [`open_model`].
pub fn read_model(path: impl AsRef<Path>, options: ModelOptions) -> Result<Model, Error> {
    open(path.as_ref(), options, |file| Ok(read(file, u64::MAX)?.into()))
}

fn open(
    path: &Path,
    options: ModelOptions,
    contents: impl Fn(&Path) -> Result<SharedBytes, Error>,
) -> Result<Model, Error> {
    // All threads read weights.
    qgemm_cpu::start_threads()?;
    let files = model_files(path)?;
    let settings = match files.first().and_then(|file| file.parent()) {
        Some(folder) if files.iter().any(|file| has_extension(file, "safetensors")) => settings(folder)?,
        _ => Vec::new(),
    };
    let shard = |file: &PathBuf| Ok(NamedFile { name: file.display().to_string(), contents: contents(file)? });
    let shards = files.iter().map(shard).collect::<Result<Vec<_>, Error>>()?;
    let settings: Vec<_> =
        settings.iter().map(|file| NamedFile { name: file.name.clone(), contents: file.contents.as_str() }).collect();
    let model = Model::from_files(&shards, &settings, options)?;
    match &files[..] {
        [shard] if has_extension(shard, "safetensors") => Ok(model.with_other_shards(other_shards(shard))),
        _ => Ok(model),
    }
}

/// Tensors in other shards, with their files, by the index beside a shard.
///
/// A shard opens without an index, too, so an unreadable index counts as absent.
fn other_shards(shard: &Path) -> BTreeMap<String, String> {
    let (Some(folder), Some(name)) = (shard.parent(), shard.file_name().and_then(|name| name.to_str())) else {
        return BTreeMap::new();
    };
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let paths = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let indices = paths.filter(|path| path.to_string_lossy().ends_with(SHARD_INDEX_EXTENSION));
    let maps = indices.filter_map(|path| match read_index(&path) {
        Ok(index) => Some(index.weight_map),
        Err(error) => {
            tracing::warn!(index = %path.display(), %error, "shard index ignored");
            None
        }
    });
    let mut map = maps.into_iter().find(|map| map.values().any(|file| file == name)).unwrap_or_default();
    map.retain(|_, file| file != name);
    map
}

/// Opens a file of [`PackedWeight::write`]. It is mapped, and read
/// once to verify its checksum.
///
/// ```
/// use qgemm_api::{Context, DType, XPrecision, open_packed};
/// # let folder = tempfile::tempdir().expect("a writable folder");
/// # let path = folder.path().join("ffn_up.packed");
/// let ctx = Context::open("cpu")?;
/// let weight = ctx.load_dense(&DType::F32.encode(&[0.5; 2 * 32]), DType::F32, 2, 32, Default::default())?;
/// let file = std::fs::File::create(&path).expect("a writable folder");
/// ctx.download_packed(&weight)?.write(file)?;
///
/// let again = ctx.load_packed(&open_packed(&path)?)?; // copied as it is, not packed
/// assert_eq!(ctx.linear(&again, &[1.0; 32], 1, XPrecision::Exact)?, [16.0, 16.0]);
/// # Ok::<(), qgemm_api::Error>(())
/// ```
///
/// # Errors
/// When the file cannot be opened. [`Error::NotPacked`] with the error
/// of [`PackedWeight::read`].
pub fn open_packed(path: impl AsRef<Path>) -> Result<PackedWeight, Error> {
    let path = path.as_ref();
    qgemm_cpu::start_threads()?;
    let bytes = SharedBytes::new(Arc::new(MappedFile::open(path)?));
    PackedWeight::read(&bytes).map_err(|source| Error::NotPacked { path: path.to_owned(), source })
}

/// Files with the tensors of the model at `path`, by the rules of [`open_model`].
///
/// # Errors
/// When a folder or an index cannot be read, or does not name one model. The files
/// themselves need not exist.
pub fn model_files(path: impl AsRef<Path>) -> Result<Vec<PathBuf>, Error> {
    let path = path.as_ref();
    if path.is_dir() {
        files_of_folder(path)
    } else if path.to_string_lossy().ends_with(INDEX_EXTENSION) {
        shards_of_index(path)
    } else {
        Ok(parts_of_gguf(path).unwrap_or_else(|| vec![path.to_owned()]))
    }
}

/// All parts of the split GGUF file that `path` is a part of, by its name.
fn parts_of_gguf(path: &Path) -> Option<Vec<PathBuf>> {
    let (rest, count) = path.file_name()?.to_str()?.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (model, number) = rest.rsplit_once('-')?;
    let digits = |text: &str| text.parse::<u32>().ok().filter(|_| text.len() == PART_DIGITS);
    let (number, count) = (digits(number)?, digits(count)?);
    let all = 1..=count;
    all.contains(&number).then(|| {
        all.map(|part| path.with_file_name(format!("{model}-{part:0PART_DIGITS$}-of-{count:0PART_DIGITS$}.gguf")))
            .collect()
    })
}

/// Digits of the number of a part.
const PART_DIGITS: usize = 5;

const INDEX_EXTENSION: &str = ".index.json";
const SHARD_INDEX_EXTENSION: &str = ".safetensors.index.json";

fn files_of_folder(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(|source| io(folder, source))? {
        files.push(entry.map_err(|source| io(folder, source))?.path());
    }
    files.sort();
    let with = |suffix: &str| -> Vec<PathBuf> {
        files.iter().filter(|file| file.to_string_lossy().ends_with(suffix)).cloned().collect()
    };
    let candidates = [with(SHARD_INDEX_EXTENSION), with(".safetensors"), with(".gguf")];
    match candidates.each_ref().map(Vec::as_slice) {
        [[index], _, _] => shards_of_index(index),
        [[], [file], []] | [[], [], [file]] => Ok(vec![file.clone()]),
        [[], [], [first, ..]] if parts_of_gguf(first).is_some_and(|parts| parts == candidates[2]) => {
            Ok(candidates[2].clone())
        }
        [indices, safetensors, gguf] => {
            let counts =
                format!("{} indices, {} safetensors and {} GGUF files", indices.len(), safetensors.len(), gguf.len());
            Err(bad(folder, format!("expected a folder with one model, got {counts}: name the file")))
        }
    }
}

/// Shard index, as `transformers` writes it.
#[derive(Deserialize)]
struct Index {
    /// Tensor name → file name.
    weight_map: BTreeMap<String, String>,
}

fn read_index(path: &Path) -> Result<Index, Error> {
    let text = read_text(path, MOST_INDEX)?;
    serde_json::from_str(&strict_json(&text))
        .map_err(|error| bad(path, format!("expected an index of shards: {error}")))
}

fn shards_of_index(path: &Path) -> Result<Vec<PathBuf>, Error> {
    let index = read_index(path)?;
    let names: BTreeSet<&str> = index.weight_map.values().map(String::as_str).collect();
    if names.is_empty() {
        return Err(bad(path, "expected at least one shard, got none".into()));
    }
    let folder = path.parent().unwrap_or(Path::new(""));
    names
        .into_iter()
        .map(|name| {
            let mut components = Path::new(name).components();
            match (components.next(), components.next()) {
                (Some(Component::Normal(file)), None) => Ok(folder.join(file)),
                _ => Err(bad(path, format!("shard `{name}`: expected the name of a file in the same folder"))),
            }
        })
        .collect()
}

/// `config.json` beside the files of the model at `path`, if any.
pub(crate) fn config_of(path: &Path) -> Result<Option<NamedFile<String>>, Error> {
    match model_files(path)?.first().and_then(|file| file.parent()) {
        Some(folder) => read_if_there(&folder.join("config.json")),
        None => Ok(None),
    }
}

/// Files with quantization settings. Some have other contents, too.
const SETTINGS: [&str; 5] =
    ["config.json", "quantize_config.json", "quant_config.json", "quantization_config.json", "hf_quant_config.json"];

/// Settings files in `folder`.
fn settings(folder: &Path) -> Result<Vec<NamedFile<String>>, Error> {
    SETTINGS.iter().filter_map(|name| read_if_there(&folder.join(name)).transpose()).collect()
}

fn read_if_there(path: &Path) -> Result<Option<NamedFile<String>>, Error> {
    match read_text(path, MOST_SETTINGS) {
        Ok(contents) => Ok(Some(NamedFile { name: path.display().to_string(), contents })),
        Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Maximum size of a settings file. A few hundred bytes of it matter.
const MOST_SETTINGS: u64 = 16 << 20;
/// Maximum size of an index. A million tensors take 100 MB.
const MOST_INDEX: u64 = 256 << 20;

/// Text of a JSON file of at most `limit` bytes.
pub(crate) fn read_text(path: &Path, limit: u64) -> Result<String, Error> {
    let bytes = read(path, limit)?;
    String::from_utf8(bytes).map_err(|_| bad(path, "expected text in UTF-8".into()))
}

/// Contents of a regular file of at most `limit` bytes.
fn read(path: &Path, limit: u64) -> Result<Vec<u8>, Error> {
    let failed = |source| io(path, source);
    let metadata = fs::metadata(path).map_err(failed)?;
    check_regular(&metadata).map_err(failed)?;
    let too_long = || bad(path, format!("expected at most {limit} bytes"));
    if metadata.len() > limit {
        return Err(too_long());
    }
    let mut bytes = Vec::new();
    let expected = usize::try_from(metadata.len().min(limit)).unwrap_or(usize::MAX);
    bytes.try_reserve_exact(expected).map_err(|_| failed(ErrorKind::OutOfMemory.into()))?;
    // The file may have grown since.
    fs::File::open(path).map_err(failed)?.take(limit.saturating_add(1)).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > limit {
        return Err(too_long());
    }
    Ok(bytes)
}

fn has_extension(path: &Path, extension: &str) -> bool {
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case(extension))
}

fn io(path: &Path, source: std::io::Error) -> Error {
    Error::Io { path: path.to_owned(), source }
}

fn bad(path: &Path, what: String) -> Error {
    FormatError::BadFile { file: path.display().to_string(), what }.into()
}
