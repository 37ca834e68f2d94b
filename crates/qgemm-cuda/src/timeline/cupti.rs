//! The part of CUPTI's activity interface that a timeline needs
//! ("CUPTI Activity API", CUPTI documentation).

use std::alloc::{Layout, alloc, dealloc};
use std::env;
use std::ffi::{CStr, OsString, c_char, c_int, c_void};
use std::ptr;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use libloading::Library;

use super::entry::TimelineEntry;
use crate::nvrtc::toolkits;

/// Names CUPTI's library.
pub const CUPTI_VARIABLE: &str = "QGEMM_CUPTI";

type Status = c_int;
type RequestBuffer = unsafe extern "C" fn(*mut *mut u8, *mut usize, *mut usize);
type CompleteBuffer = unsafe extern "C" fn(*mut c_void, u32, *mut u8, usize, usize);

const SUCCESS: Status = 0;
/// Bytes of a buffer of records, and its alignment.
const BUFFER: usize = 1 << 20;
const ALIGNMENT: usize = 8;
/// Kinds of records (`CUpti_ActivityKind`).
const MEMCPY: u32 = 1;
const MEMSET: u32 = 2;
const CONCURRENT_KERNEL: u32 = 10;
const KINDS: [u32; 3] = [MEMCPY, MEMSET, CONCURRENT_KERNEL];
/// Waits for records of work that is done.
const FLUSH_FORCED: u32 = 1;
/// Copies to the host (`CUpti_ActivityMemcpyKind`).
const TO_HOST: u8 = 2;

/// File names, newest first.
const NAMES: [&str; 4] = ["libcupti.so.13", "libcupti.so.12", "libcupti.so", "cupti64_2025.3.0.dll"];
/// Folders of a toolkit or of Python packages that hold it.
const FOLDERS: [&str; 5] =
    ["extras/CUPTI/lib64", "lib64", "targets/x86_64-linux/lib", "nvidia/cuda_cupti/lib", "nvidia/cu13/lib"];

/// Entries that CUPTI has delivered.
static DELIVERED: Mutex<Vec<TimelineEntry>> = Mutex::new(Vec::new());

/// Kernel: the prefix of `CUpti_ActivityKernel5` and later.
#[repr(C)]
#[derive(Clone, Copy)]
struct KernelRecord {
    kind: u32,
    cache_config: u8,
    shared_memory_config: u8,
    registers: u16,
    cache_requested: u32,
    cache_executed: u32,
    start: u64,
    end: u64,
    completed: u64,
    device: u32,
    context: u32,
    stream: u32,
    grid: [i32; 3],
    block: [i32; 3],
    static_shared: i32,
    dynamic_shared: i32,
    local_of_thread: u32,
    local: u32,
    correlation: u32,
    grid_id: i64,
    name: *const c_char,
}

/// Copy record, or that of a fill: the prefix of `CUpti_ActivityMemcpy3` and `CUpti_ActivityMemset2`
/// and later. They differ before `bytes` only.
#[repr(C)]
#[derive(Clone, Copy)]
struct CopyRecord {
    kind: u32,
    /// Details of a copy: direction, kinds of memory, flags.
    details: [u8; 4],
    bytes: u64,
    start: u64,
    end: u64,
}

/// CUPTI library: the functions that a timeline calls.
pub(super) struct Cupti {
    enable: unsafe extern "C" fn(u32) -> Status,
    disable: unsafe extern "C" fn(u32) -> Status,
    flush_all: unsafe extern "C" fn(u32) -> Status,
    next_record: unsafe extern "C" fn(*mut u8, usize, *mut *mut u32) -> Status,
}

impl Cupti {
    /// The library, loaded once.
    ///
    /// # Errors
    /// Why there is none.
    pub fn get() -> Result<&'static Self, String> {
        static LOADED: OnceLock<Result<Cupti, String>> = OnceLock::new();
        LOADED.get_or_init(Self::open).as_ref().map_err(Clone::clone)
    }

    fn open() -> Result<Self, String> {
        // SAFETY: CUPTI's initialisers have no preconditions. The user named
        // the file, or it is where NVIDIA's toolkit puts it.
        let library = candidates().into_iter().find_map(|file| unsafe { Library::new(file) }.ok());
        let library = library.ok_or_else(|| {
            format!(
                "CUPTI ({}) is neither in `{CUPTI_VARIABLE}` nor in a CUDA toolkit nor on the library path",
                NAMES[0]
            )
        })?;
        let missing = |error: libloading::Error| error.to_string();
        // SAFETY: the types are those of `cupti_activity.h`, unchanged since CUDA 6.5.
        let (api, register) = unsafe {
            let register: unsafe extern "C" fn(RequestBuffer, CompleteBuffer) -> Status =
                *library.get(b"cuptiActivityRegisterCallbacks\0").map_err(missing)?;
            let api = Self {
                enable: *library.get(b"cuptiActivityEnable\0").map_err(missing)?,
                disable: *library.get(b"cuptiActivityDisable\0").map_err(missing)?,
                flush_all: *library.get(b"cuptiActivityFlushAll\0").map_err(missing)?,
                next_record: *library.get(b"cuptiActivityGetNextRecord\0").map_err(missing)?,
            };
            (api, register)
        };
        // The functions stay valid because the library is never unloaded.
        std::mem::forget(library);
        // SAFETY: both functions have the types that CUPTI calls, and live for ever.
        check("cuptiActivityRegisterCallbacks", unsafe { register(request_buffer, complete_buffer) })?;
        Ok(api)
    }

    /// Starts recording.
    ///
    /// # Errors
    /// Why CUPTI refuses, such as another profiler.
    pub fn start(&self) -> Result<(), String> {
        // SAFETY: recording is off, and the callbacks are registered.
        check("cuptiActivityFlushAll", unsafe { (self.flush_all)(FLUSH_FORCED) })?;
        delivered().clear();
        // SAFETY: as above; the kinds exist in every version.
        KINDS.into_iter().try_for_each(|kind| check("cuptiActivityEnable", unsafe { (self.enable)(kind) }))
    }

    /// Stops recording. Returns the entries since the start.
    ///
    /// # Errors
    /// As [`Cupti::start`].
    pub fn stop(&self) -> Result<Vec<TimelineEntry>, String> {
        // SAFETY: the callbacks are registered, and take what CUPTI gives them.
        let flushed = check("cuptiActivityFlushAll", unsafe { (self.flush_all)(FLUSH_FORCED) });
        for kind in KINDS {
            // SAFETY: the kind was enabled.
            check("cuptiActivityDisable", unsafe { (self.disable)(kind) })?;
        }
        flushed?;
        Ok(std::mem::take(&mut *delivered()))
    }
}

/// Files to try.
fn candidates() -> Vec<OsString> {
    let named = env::var_os(CUPTI_VARIABLE).filter(|name| !name.is_empty());
    if let Some(named) = named {
        return vec![named];
    }
    let folders = toolkits().into_iter().flat_map(|root| FOLDERS.map(|folder| root.join(folder)));
    let files = folders.flat_map(|folder| NAMES.map(|name| folder.join(name).into_os_string()));
    files.chain(NAMES.map(OsString::from)).collect()
}

fn check(call: &str, status: Status) -> Result<(), String> {
    if status == SUCCESS { Ok(()) } else { Err(format!("{call} failed with status {status}")) }
}

fn delivered() -> MutexGuard<'static, Vec<TimelineEntry>> {
    DELIVERED.lock().unwrap_or_else(PoisonError::into_inner)
}

fn layout() -> Layout {
    const LAYOUT: Layout = match Layout::from_size_align(BUFFER, ALIGNMENT) {
        Ok(layout) => layout,
        Err(_) => panic!("a power of two"),
    };
    LAYOUT
}

/// Gives CUPTI a buffer; none when memory is exhausted, which drops records.
unsafe extern "C" fn request_buffer(buffer: *mut *mut u8, size: *mut usize, records: *mut usize) {
    // SAFETY: CUPTI passes three writable places. The layout is not empty.
    unsafe {
        let memory = alloc(layout());
        *buffer = memory;
        *size = if memory.is_null() { 0 } else { BUFFER };
        *records = 0;
    }
}

/// Takes a buffer back, with `valid` bytes of records.
unsafe extern "C" fn complete_buffer(_: *mut c_void, _: u32, buffer: *mut u8, _: usize, valid: usize) {
    if buffer.is_null() {
        return;
    }
    if let (Ok(cupti), true) = (Cupti::get(), valid > 0) {
        let mut record = ptr::null_mut();
        // SAFETY: the buffer has `valid` bytes of records, which
        // CUPTI walks; the first call has no record.
        while unsafe { (cupti.next_record)(buffer, valid, &mut record) } == SUCCESS {
            // SAFETY: CUPTI has pointed to a whole record.
            let entry = unsafe { entry_of(record) };
            delivered().extend(entry);
        }
    }
    // SAFETY: `request_buffer` allocated it with this layout, and CUPTI
    // has given it back.
    unsafe { dealloc(buffer, layout()) }
}

/// The entry of a record; `None` for another kind.
///
/// # Safety
/// `record` points to a whole record of its kind.
unsafe fn entry_of(record: *const u32) -> Option<TimelineEntry> {
    // SAFETY: every record begins with its kind.
    let kind = unsafe { record.read() };
    if kind == CONCURRENT_KERNEL {
        // SAFETY: the record is one of a kernel, of which this is a prefix;
        // records are aligned to eight bytes.
        let kernel = unsafe { record.cast::<KernelRecord>().read() };
        let name = if kernel.name.is_null() {
            String::new()
        } else {
            // SAFETY: CUPTI's names are zero-terminated and live as long as the process.
            unsafe { CStr::from_ptr(kernel.name) }.to_string_lossy().into_owned()
        };
        let count = |number: i32| number.max(0) as u32;
        return Some(TimelineEntry {
            name,
            grid: kernel.grid.map(count),
            threads: kernel.block.map(count).into_iter().product(),
            shared_bytes: count(kernel.static_shared) + count(kernel.dynamic_shared),
            start: kernel.start,
            end: kernel.end,
        });
    }
    if kind != MEMCPY && kind != MEMSET {
        return None;
    }
    // SAFETY: the record is one of a copy or memset, of which this is a prefix.
    let copy = unsafe { record.cast::<CopyRecord>().read() };
    let name = match (kind, copy.details[0]) {
        (MEMSET, _) => TimelineEntry::MEMSET,
        (_, TO_HOST) => TimelineEntry::COPY_TO_HOST,
        _ => TimelineEntry::COPY,
    };
    let (start, end) = (copy.start, copy.end);
    Some(TimelineEntry { name: name.to_owned(), grid: [0; 3], threads: 0, shared_bytes: 0, start, end })
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    /// Offsets of CUPTI 12.9's header.
    #[test]
    fn records_have_the_layout_of_the_header() {
        assert_eq!(
            [
                offset_of!(KernelRecord, start),
                offset_of!(KernelRecord, grid),
                offset_of!(KernelRecord, static_shared),
                offset_of!(KernelRecord, name)
            ],
            [16, 52, 76, 104]
        );
        assert_eq!([offset_of!(CopyRecord, bytes), offset_of!(CopyRecord, start)], [8, 16]);
    }

    #[test]
    fn records_become_entries() {
        let mut record = KernelRecord {
            kind: CONCURRENT_KERNEL,
            cache_config: 0,
            shared_memory_config: 0,
            registers: 0,
            cache_requested: 0,
            cache_executed: 0,
            start: 5,
            end: 9,
            completed: 0,
            device: 0,
            context: 0,
            stream: 0,
            grid: [2, 3, 4],
            block: [128, 1, 1],
            static_shared: 16,
            dynamic_shared: 100,
            local_of_thread: 0,
            local: 0,
            correlation: 0,
            grid_id: 0,
            name: c"qg_gemv".as_ptr(),
        };
        let entry = |record: &KernelRecord| {
            // SAFETY: the record is whole.
            unsafe { entry_of(ptr::from_ref(record).cast()) }
        };
        let expected = TimelineEntry {
            name: "qg_gemv".into(),
            grid: [2, 3, 4],
            threads: 128,
            shared_bytes: 116,
            start: 5,
            end: 9,
        };
        assert_eq!(entry(&record), Some(expected));
        record.kind = u32::MAX;
        assert_eq!(entry(&record), None);
    }
}
