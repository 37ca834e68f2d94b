//! NVRTC, loaded when the first kernel must be compiled.
//!
//! These are separate bindings: cudarc's only look for the CUDA
//! version they were generated for, only return PTX, and panic
//! when the library is missing.

mod api;
mod error;
mod locate;

use std::ffi::CString;
use std::path::Path;
use std::sync::OnceLock;

use crate::target::Target;
pub use error::NvrtcError;
pub use locate::{LIBRARY_VARIABLE, toolkits};

/// Result of a compilation.
#[derive(Clone, Debug)]
pub(crate) struct Compiled {
    /// The cubin, or zero-terminated PTX.
    pub image: Vec<u8>,
    /// Compiler remarks; not empty on success.
    pub log: String,
}

/// The loaded compiler.
#[derive(Debug)]
pub(crate) struct Nvrtc {
    api: api::Api,
    version: String,
    supported: Vec<u32>,
}

impl Nvrtc {
    /// The compiler of this process, loaded on first use.
    pub(crate) fn get() -> Result<&'static Nvrtc, NvrtcError> {
        static NVRTC: OnceLock<Result<Nvrtc, NvrtcError>> = OnceLock::new();
        NVRTC.get_or_init(Nvrtc::load).as_ref().map_err(Clone::clone)
    }

    /// The file that [`Nvrtc::get`] loads, found without loading it; `None`
    /// when the system's loader must search.
    pub(crate) fn path() -> Option<&'static Path> {
        locate::library().ok().flatten()
    }

    /// Whether a library is installed now; the result is not cached.
    pub(crate) fn is_installed() -> Result<bool, NvrtcError> {
        match locate::search().map_err(|why| NvrtcError::Missing { why })? {
            Some(_) => Ok(true),
            None => Ok(locate::LIBRARY_NAMES.iter().any(|name| api::Api::open(name.as_ref()).is_ok())),
        }
    }

    fn load() -> Result<Nvrtc, NvrtcError> {
        let _span = tracing::info_span!("load nvrtc").entered();
        let missing = |why| NvrtcError::Missing { why };
        let api = match locate::library().map_err(missing)? {
            Some(path) => api::Api::open(path.as_os_str())
                .map_err(|e| missing(format!("{} cannot be loaded: {e}", path.display())))?,
            None => locate::LIBRARY_NAMES
                .iter()
                .find_map(|name| api::Api::open(name.as_ref()).ok())
                .ok_or_else(|| missing(locate::not_found()))?,
        };
        let (major, minor) = api.version()?;
        let supported = api.supported_archs()?;
        Ok(Nvrtc { api, version: format!("{major}.{minor}"), supported })
    }

    /// Version as `major.minor`.
    pub(crate) fn version(&self) -> &str {
        &self.version
    }

    /// Supported compute capabilities, ascending.
    pub(crate) fn supported(&self) -> &[u32] {
        &self.supported
    }

    /// Compiles `source` (called `name` in messages) for `target`.
    /// `headers` are (include name, text).
    pub(crate) fn compile(
        &self,
        name: &str,
        source: &str,
        headers: &[(&str, &str)],
        options: &[String],
        target: Target,
    ) -> Result<Compiled, NvrtcError> {
        if !self.supported.contains(&target.arch()) {
            return Err(NvrtcError::UnsupportedTarget {
                version: self.version.clone(),
                target,
                supported: self.supported.clone(),
            });
        }
        let texts = |pick: fn(&(&str, &str)) -> String| {
            headers.iter().map(|h| CString::new(pick(h))).collect::<Result<Vec<_>, _>>()
        };
        let header_names = texts(|h| h.0.to_owned())?;
        let header_texts = texts(|h| h.1.to_owned())?;
        let program = self.api.create(&CString::new(source)?, &CString::new(name)?, &header_texts, &header_names)?;
        let all: Vec<String> =
            std::iter::once(format!("--gpu-architecture={target}")).chain(options.iter().cloned()).collect();
        let c_options = all.iter().map(|o| CString::new(o.as_str())).collect::<Result<Vec<_>, _>>()?;
        let result = program.compile(&c_options);
        let log = program.log()?;
        match result {
            Ok(()) => {}
            Err(NvrtcError::Compile { .. }) => return Err(NvrtcError::Compile { options: all.join(" "), log }),
            Err(other) => return Err(other),
        }
        let image = if target.is_ptx() { program.ptx()? } else { program.cubin()? };
        Ok(Compiled { image, log })
    }
}
