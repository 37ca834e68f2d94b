//! NCCL's functions, loaded from its library.

use std::error::Error as _;
use std::ffi::{CStr, OsStr, c_char, c_int, c_uint, c_void};
use std::path::PathBuf;
use std::ptr;
use std::sync::OnceLock;

use cudarc::driver::sys::CUstream;
use libloading::Library;
use qgemm_hal::HalError;

/// Variable that names the library.
pub const LIBRARY_VARIABLE: &str = "QGEMM_NCCL";
/// Names under which packages install it.
const LIBRARY_NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
/// Oldest version: 2.18.
const OLDEST: c_int = 21_800;
/// Bytes of a unique id.
pub const ID_BYTES: usize = 128;

/// A communicator's handle.
pub type Handle = *mut c_void;

/// Identity of a group, from [`unique_id`](super::unique_id).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId(pub [u8; ID_BYTES]);

/// Element types by NCCL's numbers.
#[derive(Clone, Copy)]
#[repr(i32)]
pub enum Type {
    U8 = 1,
    F16 = 6,
    F32 = 7,
    BF16 = 9,
}

/// NCCL's number of sums.
const SUM: c_int = 0;
/// Result of a call that did what it should.
const SUCCESS: c_int = 0;

type OnMatrix = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Handle, CUstream) -> c_int;
type Reducing = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Handle, CUstream) -> c_int;
type Rooted = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Handle, CUstream) -> c_int;
type Reduce = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, c_int, Handle, CUstream) -> c_int;

/// The functions that are used. All exist since NCCL 2.18.
pub struct Api {
    get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    init_rank: unsafe extern "C" fn(*mut Handle, c_int, UniqueId, c_int) -> c_int,
    abort: unsafe extern "C" fn(Handle) -> c_int,
    asynchronous_error: unsafe extern "C" fn(Handle, *mut c_int) -> c_int,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    last_error: unsafe extern "C" fn(Handle) -> *const c_char,
    group_start: unsafe extern "C" fn() -> c_int,
    group_end: unsafe extern "C" fn() -> c_int,
    all_reduce: Reducing,
    all_gather: OnMatrix,
    reduce_scatter: Reducing,
    reduce: Reduce,
    broadcast: Rooted,
    /// Last, so that it outlives the functions.
    _library: Library,
}

/// Operands of a call: device addresses, elements and their type.
#[derive(Clone, Copy)]
pub struct Elements {
    pub from: u64,
    pub to: u64,
    pub count: usize,
    pub element: Type,
}

impl Elements {
    fn pointers(&self) -> (*const c_void, *mut c_void) {
        (ptr::without_provenance(self.from as usize), ptr::without_provenance_mut(self.to as usize))
    }
}

impl Api {
    /// NCCL of this process, loaded on first use.
    ///
    /// # Errors
    /// [`HalError::NoLibrary`] when it is missing or too old.
    pub fn get() -> Result<&'static Self, HalError> {
        static API: OnceLock<Result<Api, HalError>> = OnceLock::new();
        API.get_or_init(|| Self::find(std::env::var_os(LIBRARY_VARIABLE).map(PathBuf::from)))
            .as_ref()
            .map_err(Clone::clone)
    }

    /// The library that a variable names, else that of the system.
    pub fn find(named: Option<PathBuf>) -> Result<Self, HalError> {
        let named = named.filter(|path| !path.as_os_str().is_empty());
        let names: Vec<&OsStr> = match &named {
            Some(path) => vec![path.as_os_str()],
            None => LIBRARY_NAMES.iter().map(OsStr::new).collect(),
        };
        let mut reasons = Vec::new();
        for name in names {
            // SAFETY: loading NCCL runs its initialisers, which have no
            // preconditions.
            match unsafe { Library::new(name) } {
                Ok(library) => return Self::of(library),
                Err(error) => {
                    // The system's words are the source.
                    let why = error.source().map_or_else(|| error.to_string(), ToString::to_string);
                    reasons.push(format!("{}: {why}", name.display()));
                }
            }
        }
        let why = format!(
            "{}; install it (such as `pip install nvidia-nccl-cu12`), or name its library in {LIBRARY_VARIABLE}",
            reasons.join("; ")
        );
        Err(no_library(why))
    }

    fn of(library: Library) -> Result<Self, HalError> {
        // SAFETY: this and the types below are those of `nccl.h` of NCCL
        // 2.18.
        let version = unsafe { function::<unsafe extern "C" fn(*mut c_int) -> c_int>(&library, "ncclGetVersion")? };
        let mut number = 0;
        // SAFETY: NCCL writes one integer, which lives through the call.
        if unsafe { version(&mut number) } != SUCCESS {
            return Err(no_library("it does not tell its version".into()));
        }
        check_version(number)?;
        // SAFETY: as above.
        unsafe {
            Ok(Self {
                get_unique_id: function(&library, "ncclGetUniqueId")?,
                init_rank: function(&library, "ncclCommInitRank")?,
                abort: function(&library, "ncclCommAbort")?,
                asynchronous_error: function(&library, "ncclCommGetAsyncError")?,
                error_string: function(&library, "ncclGetErrorString")?,
                last_error: function(&library, "ncclGetLastError")?,
                group_start: function(&library, "ncclGroupStart")?,
                group_end: function(&library, "ncclGroupEnd")?,
                all_reduce: function(&library, "ncclAllReduce")?,
                all_gather: function(&library, "ncclAllGather")?,
                reduce_scatter: function(&library, "ncclReduceScatter")?,
                reduce: function(&library, "ncclReduce")?,
                broadcast: function(&library, "ncclBroadcast")?,
                _library: library,
            })
        }
    }

    /// Identity of a new group.
    pub fn unique_id(&self) -> Result<UniqueId, String> {
        let mut id = UniqueId([0; ID_BYTES]);
        // SAFETY: NCCL writes one id, which lives through the call.
        let status = unsafe { (self.get_unique_id)(&mut id) };
        self.check("ncclGetUniqueId", status).map(|()| id)
    }

    /// Joins a group with the current context's device. Waits for all
    /// ranks.
    pub fn init_rank(&self, id: UniqueId, rank: usize, world: usize) -> Result<Handle, String> {
        let mut handle = ptr::null_mut();
        let (rank, world) = (rank as c_int, world as c_int);
        // SAFETY: NCCL writes one handle, which lives through the call.
        let status = unsafe { (self.init_rank)(&mut handle, world, id, rank) };
        self.check("ncclCommInitRank", status).map(|()| handle)
    }

    /// Ends a communicator, and its kernels that wait for others.
    ///
    /// # Safety
    /// The handle is of [`Api::init_rank`] and was not ended before.
    /// No other call begins with it.
    pub unsafe fn abort(&self, handle: Handle) -> Result<(), String> {
        // SAFETY: by the caller.
        self.check("ncclCommAbort", unsafe { (self.abort)(handle) })
    }

    /// An error of work that was submitted before.
    ///
    /// # Safety
    /// The handle is alive.
    pub unsafe fn asynchronous_error(&self, handle: Handle) -> Result<(), String> {
        let mut error = SUCCESS;
        // SAFETY: NCCL writes one number, which lives through the call;
        // the handle is alive.
        let status = unsafe { (self.asynchronous_error)(handle, &mut error) };
        self.check("ncclCommGetAsyncError", status)?;
        self.check("a collective", error)
    }

    /// Runs `calls` as one launch.
    pub fn grouped(&self, calls: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
        // SAFETY: they have no preconditions; every start has its end.
        self.check("ncclGroupStart", unsafe { (self.group_start)() })?;
        let called = calls();
        // SAFETY: as above.
        let ended = self.check("ncclGroupEnd", unsafe { (self.group_end)() });
        called.and(ended)
    }

    /// Sum over all ranks.
    ///
    /// # Safety
    /// The handle is alive, and the addresses are of its device, with
    /// room for the elements until the stream has done the work. So
    /// for the functions below.
    pub unsafe fn all_reduce(&self, on: Elements, handle: Handle, stream: CUstream) -> Result<(), String> {
        let (from, to) = on.pointers();
        // SAFETY: by the caller.
        let status = unsafe { (self.all_reduce)(from, to, on.count, on.element as c_int, SUM, handle, stream) };
        self.check("ncclAllReduce", status)
    }

    /// `count` elements of each rank, behind each other.
    ///
    /// # Safety
    /// As [`Api::all_reduce`].
    pub unsafe fn all_gather(&self, on: Elements, handle: Handle, stream: CUstream) -> Result<(), String> {
        let (from, to) = on.pointers();
        // SAFETY: by the caller.
        let status = unsafe { (self.all_gather)(from, to, on.count, on.element as c_int, handle, stream) };
        self.check("ncclAllGather", status)
    }

    /// Sum over all ranks, `count` elements of it on each.
    ///
    /// # Safety
    /// As [`Api::all_reduce`].
    pub unsafe fn reduce_scatter(&self, on: Elements, handle: Handle, stream: CUstream) -> Result<(), String> {
        let (from, to) = on.pointers();
        // SAFETY: by the caller.
        let status = unsafe { (self.reduce_scatter)(from, to, on.count, on.element as c_int, SUM, handle, stream) };
        self.check("ncclReduceScatter", status)
    }

    /// Sum over all ranks, on one.
    ///
    /// # Safety
    /// As [`Api::all_reduce`].
    pub unsafe fn reduce(&self, on: Elements, root: usize, handle: Handle, stream: CUstream) -> Result<(), String> {
        let (from, to) = on.pointers();
        let root = root as c_int;
        // SAFETY: by the caller.
        let status = unsafe { (self.reduce)(from, to, on.count, on.element as c_int, SUM, root, handle, stream) };
        self.check("ncclReduce", status)
    }

    /// Elements of one rank, on all.
    ///
    /// # Safety
    /// As [`Api::all_reduce`].
    pub unsafe fn broadcast(&self, on: Elements, root: usize, handle: Handle, stream: CUstream) -> Result<(), String> {
        let (from, to) = on.pointers();
        let root = root as c_int;
        // SAFETY: by the caller.
        let status = unsafe { (self.broadcast)(from, to, on.count, on.element as c_int, root, handle, stream) };
        self.check("ncclBroadcast", status)
    }

    fn check(&self, call: &str, status: c_int) -> Result<(), String> {
        if status == SUCCESS {
            return Ok(());
        }
        // SAFETY: both return text of NCCL that lives on; no handle
        // means the last error of any.
        let [name, last] = unsafe { [(self.error_string)(status), (self.last_error)(ptr::null_mut())] }.map(|text| {
            if text.is_null() {
                return String::new();
            }
            // SAFETY: NCCL's texts end with a zero.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned()
        });
        Err(format!("{call}: {name} ({last})"))
    }
}

/// A function of the library.
///
/// # Safety
/// `F` is its type.
unsafe fn function<F: Copy>(library: &Library, name: &str) -> Result<F, HalError> {
    // SAFETY: by the caller.
    let found = unsafe { library.get::<F>(name.as_bytes()) };
    found.map(|function| *function).map_err(|_| no_library(format!("it lacks {name}")))
}

fn check_version(version: c_int) -> Result<(), HalError> {
    let [expected, got] = [OLDEST, version].map(dotted);
    match version < OLDEST {
        true => Err(no_library(format!("it is version {got}: expected {expected} or newer"))),
        false => Ok(()),
    }
}

/// `2.18.5` of 21805.
fn dotted(version: c_int) -> String {
    let version = version as c_uint;
    format!("{}.{}.{}", version / 10_000, version % 10_000 / 100, version % 100)
}

fn no_library(why: String) -> HalError {
    HalError::NoLibrary { library: "NCCL", why }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(path: &str) -> String {
        let Err(error) = Api::find(Some(path.into())) else { panic!("{path} is no NCCL") };
        assert!(matches!(error, HalError::NoLibrary { library: "NCCL", .. }), "{error:?}");
        error.to_string()
    }

    #[test]
    fn a_missing_library_says_what_to_install() {
        let words = refusal("/nowhere/libnccl.so.2");
        assert!(words.contains("/nowhere/libnccl.so.2") && words.contains("pip install"), "{words}");
        assert!(words.contains(LIBRARY_VARIABLE), "{words}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn another_library_is_no_nccl() {
        assert!(refusal("libc.so.6").contains("it lacks ncclGetVersion"));
    }

    #[test]
    fn a_group_has_an_id_where_nccl_is_installed() {
        match Api::get() {
            Ok(api) => {
                let [first, second] = [(); 2].map(|()| api.unique_id().map(|id| id.0));
                assert!(first.is_ok() && first != second, "{first:?}");
            }
            Err(error) => assert!(matches!(error, HalError::NoLibrary { library: "NCCL", .. }), "{error}"),
        }
    }

    #[test]
    fn old_versions_are_refused() {
        assert!(check_version(21_805).is_ok() && check_version(22_703).is_ok());
        let words = check_version(21_403).unwrap_err().to_string();
        assert!(words.contains("2.14.3") && words.contains("2.18.0 or newer"), "{words}");
    }
}
