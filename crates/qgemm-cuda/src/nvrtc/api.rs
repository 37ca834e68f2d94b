//! NVRTC functions ("NVRTC", CUDA Toolkit documentation), behind
//! types that release their resources.

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::ptr;

use libloading::Library;

use super::error::NvrtcError;

type Status = c_int;
type Handle = *mut c_void;

const SUCCESS: Status = 0;
const ERROR_COMPILATION: Status = 6;

/// The functions in use.
#[derive(Debug)]
pub(super) struct Api {
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status,
    num_supported_archs: unsafe extern "C" fn(*mut c_int) -> Status,
    supported_archs: unsafe extern "C" fn(*mut c_int) -> Status,
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
    create: unsafe extern "C" fn(
        *mut Handle,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Status,
    destroy: unsafe extern "C" fn(*mut Handle) -> Status,
    compile: unsafe extern "C" fn(Handle, c_int, *const *const c_char) -> Status,
    cubin_size: unsafe extern "C" fn(Handle, *mut usize) -> Status,
    cubin: unsafe extern "C" fn(Handle, *mut c_char) -> Status,
    ptx_size: unsafe extern "C" fn(Handle, *mut usize) -> Status,
    ptx: unsafe extern "C" fn(Handle, *mut c_char) -> Status,
    log_size: unsafe extern "C" fn(Handle, *mut usize) -> Status,
    log: unsafe extern "C" fn(Handle, *mut c_char) -> Status,
}

impl Api {
    /// Loads the library `file` for the life of the process.
    pub(super) fn open(file: &OsStr) -> Result<Self, libloading::Error> {
        // SAFETY: NVRTC's initialisers have no preconditions. The user named the
        // file, or it is where NVIDIA's packages put it.
        let library = unsafe { Library::new(file) }?;
        // SAFETY: the types above are those of `nvrtc.h`,
        // unchanged since CUDA 11.2.
        let api = unsafe {
            Self {
                version: *library.get(b"nvrtcVersion\0")?,
                num_supported_archs: *library.get(b"nvrtcGetNumSupportedArchs\0")?,
                supported_archs: *library.get(b"nvrtcGetSupportedArchs\0")?,
                error_string: *library.get(b"nvrtcGetErrorString\0")?,
                create: *library.get(b"nvrtcCreateProgram\0")?,
                destroy: *library.get(b"nvrtcDestroyProgram\0")?,
                compile: *library.get(b"nvrtcCompileProgram\0")?,
                cubin_size: *library.get(b"nvrtcGetCUBINSize\0")?,
                cubin: *library.get(b"nvrtcGetCUBIN\0")?,
                ptx_size: *library.get(b"nvrtcGetPTXSize\0")?,
                ptx: *library.get(b"nvrtcGetPTX\0")?,
                log_size: *library.get(b"nvrtcGetProgramLogSize\0")?,
                log: *library.get(b"nvrtcGetProgramLog\0")?,
            }
        };
        // The function pointers stay valid because the library is never unloaded.
        std::mem::forget(library);
        Ok(api)
    }

    pub(super) fn version(&self) -> Result<(i32, i32), NvrtcError> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both pointers are to writable integers.
        self.check("nvrtcVersion", unsafe { (self.version)(&mut major, &mut minor) })?;
        Ok((major, minor))
    }

    pub(super) fn supported_archs(&self) -> Result<Vec<u32>, NvrtcError> {
        let mut count = 0;
        // SAFETY: the pointer is to a writable integer.
        self.check("nvrtcGetNumSupportedArchs", unsafe { (self.num_supported_archs)(&mut count) })?;
        let mut archs = vec![0 as c_int; usize::try_from(count).unwrap_or(0)];
        // SAFETY: the array has the length that the library asked for.
        self.check("nvrtcGetSupportedArchs", unsafe { (self.supported_archs)(archs.as_mut_ptr()) })?;
        let mut archs: Vec<u32> = archs.into_iter().filter_map(|a| u32::try_from(a).ok()).collect();
        archs.sort_unstable();
        Ok(archs)
    }

    /// A program with one source and in-memory headers.
    pub(super) fn create(
        &self,
        source: &CStr,
        name: &CStr,
        header_texts: &[CString],
        header_names: &[CString],
    ) -> Result<Program<'_>, NvrtcError> {
        let texts: Vec<_> = header_texts.iter().map(|t| t.as_ptr()).collect();
        let names: Vec<_> = header_names.iter().map(|n| n.as_ptr()).collect();
        let mut handle = ptr::null_mut();
        // SAFETY: all strings are zero-terminated and live through
        // the call, which copies them. Both arrays have as many
        // entries as the count says.
        let status = unsafe {
            (self.create)(
                &mut handle,
                source.as_ptr(),
                name.as_ptr(),
                texts.len().min(names.len()) as c_int,
                texts.as_ptr(),
                names.as_ptr(),
            )
        };
        self.check("nvrtcCreateProgram", status)?;
        Ok(Program { api: self, handle })
    }

    fn check(&self, call: &'static str, status: Status) -> Result<(), NvrtcError> {
        if status == SUCCESS {
            return Ok(());
        }
        // SAFETY: the function accepts every value and returns a constant string.
        let words = unsafe { CStr::from_ptr((self.error_string)(status)) };
        Err(NvrtcError::Call { call, message: words.to_string_lossy().into_owned() })
    }
}

/// An NVRTC program, destroyed on drop.
pub(super) struct Program<'a> {
    api: &'a Api,
    handle: Handle,
}

impl Program<'_> {
    /// Compiles the program. A mistake in the source returns
    /// [`NvrtcError::Compile`] with an empty log; see [`Program::log`].
    pub(super) fn compile(&self, options: &[CString]) -> Result<(), NvrtcError> {
        let pointers: Vec<_> = options.iter().map(|o| o.as_ptr()).collect();
        // SAFETY: the handle is valid, and each option ends in a
        // zero byte and lives through the call.
        let status = unsafe { (self.api.compile)(self.handle, pointers.len() as c_int, pointers.as_ptr()) };
        if status == ERROR_COMPILATION {
            return Err(NvrtcError::Compile { options: String::new(), log: String::new() });
        }
        self.api.check("nvrtcCompileProgram", status)
    }

    pub(super) fn cubin(&self) -> Result<Vec<u8>, NvrtcError> {
        self.bytes("nvrtcGetCUBIN", self.api.cubin_size, self.api.cubin)
    }

    pub(super) fn ptx(&self) -> Result<Vec<u8>, NvrtcError> {
        self.bytes("nvrtcGetPTX", self.api.ptx_size, self.api.ptx)
    }

    pub(super) fn log(&self) -> Result<String, NvrtcError> {
        let bytes = self.bytes("nvrtcGetProgramLog", self.api.log_size, self.api.log)?;
        Ok(String::from_utf8_lossy(&bytes).trim_end_matches('\0').trim().to_owned())
    }

    fn bytes(
        &self,
        call: &'static str,
        size: unsafe extern "C" fn(Handle, *mut usize) -> Status,
        get: unsafe extern "C" fn(Handle, *mut c_char) -> Status,
    ) -> Result<Vec<u8>, NvrtcError> {
        let mut len = 0;
        // SAFETY: the handle is valid and `len` is writable.
        self.api.check(call, unsafe { size(self.handle, &mut len) })?;
        let mut bytes = vec![0u8; len];
        // SAFETY: the buffer has the length that the library asked for.
        self.api.check(call, unsafe { get(self.handle, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: the handle came from `nvrtcCreateProgram` and is destroyed once.
        let status = unsafe { (self.api.destroy)(&mut self.handle) };
        if let Err(error) = self.api.check("nvrtcDestroyProgram", status) {
            tracing::warn!(%error, "an NVRTC program could not be destroyed");
        }
    }
}
