//! Host CPU identity and capabilities.

use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{OnceLock, RwLock};
use std::thread;
use std::time::Instant;

use crate::buffer::Buffer;
use crate::caps::DeviceId;
use crate::host_memory::HostMemory;

/// SIMD instruction sets that kernels are written
/// for, detected at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SimdLevel {
    /// None of the sets below.
    Scalar,
    /// Arm's Advanced SIMD.
    Neon,
    /// Advanced SIMD with 8-bit dot products.
    NeonDotprod,
    /// x86 AVX2 with FMA and F16C.
    Avx2,
    /// AVX2 with 8-bit dot products.
    AvxVnni,
    /// x86 AVX-512 F, BW, DQ and VL.
    Avx512,
    /// AVX-512 with 8-bit dot products.
    Avx512Vnni,
}

impl SimdLevel {
    /// Every level, from worst to best.
    pub const ALL: [SimdLevel; 7] = [
        SimdLevel::Scalar,
        SimdLevel::Neon,
        SimdLevel::NeonDotprod,
        SimdLevel::Avx2,
        SimdLevel::AvxVnni,
        SimdLevel::Avx512,
        SimdLevel::Avx512Vnni,
    ];

    /// The best level of this CPU.
    pub fn detect() -> Self {
        Self::ALL.into_iter().rfind(|level| level.is_available()).unwrap_or(SimdLevel::Scalar)
    }

    /// Whether this CPU supports the level.
    pub fn is_available(self) -> bool {
        if self == SimdLevel::Scalar {
            return true;
        }
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 =
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
            let avx512 = avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            match self {
                SimdLevel::Scalar => true,
                SimdLevel::Neon | SimdLevel::NeonDotprod => false,
                SimdLevel::Avx2 => avx2,
                SimdLevel::AvxVnni => avx2 && is_x86_feature_detected!("avxvnni"),
                SimdLevel::Avx512 => avx512,
                SimdLevel::Avx512Vnni => avx512 && is_x86_feature_detected!("avx512vnni"),
            }
        }
        #[cfg(target_arch = "aarch64")]
        {
            use std::arch::is_aarch64_feature_detected;
            let neon = is_aarch64_feature_detected!("neon");
            match self {
                SimdLevel::Neon => neon,
                SimdLevel::NeonDotprod => neon && is_aarch64_feature_detected!("dotprod"),
                _ => false,
            }
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        {
            false
        }
    }

    /// Lower-case name: `avx512-vnni`.
    pub const fn name(self) -> &'static str {
        match self {
            SimdLevel::Scalar => "scalar",
            SimdLevel::Neon => "neon",
            SimdLevel::NeonDotprod => "neon-dotprod",
            SimdLevel::Avx2 => "avx2",
            SimdLevel::AvxVnni => "avx-vnni",
            SimdLevel::Avx512 => "avx512",
            SimdLevel::Avx512Vnni => "avx512-vnni",
        }
    }

    /// f32 lanes of a vector register.
    pub const fn f32_lanes(self) -> u32 {
        match self {
            SimdLevel::Scalar => 1,
            SimdLevel::Neon | SimdLevel::NeonDotprod => 4,
            SimdLevel::Avx2 | SimdLevel::AvxVnni => 8,
            SimdLevel::Avx512 | SimdLevel::Avx512Vnni => 16,
        }
    }
}

/// The host CPU and its memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Host {
    /// CPU name, or its architecture when the system
    /// does not report a name.
    pub name: String,
    /// SIMD level.
    pub simd: SimdLevel,
    /// Hardware threads that this process may use.
    pub cores: u32,
    /// Memory in bytes; 0 when unknown.
    pub memory_bytes: u64,
    /// L2 cache of a core in bytes; 0 when unknown.
    pub l2_bytes: u64,
    /// Last-level cache in bytes; 0 when unknown.
    pub cache_bytes: u64,
}

impl Host {
    /// The host, detected once.
    pub fn detect() -> &'static Self {
        static HOST: OnceLock<Host> = OnceLock::new();
        HOST.get_or_init(|| {
            let caches = caches();
            Host {
                name: processor_name().unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
                simd: SimdLevel::detect(),
                cores: thread::available_parallelism().map_or(1, |n| n.get() as u32),
                memory_bytes: memory_bytes().unwrap_or(0),
                l2_bytes: caches.iter().find(|c| c.0 == 2).map_or(0, |c| c.1),
                cache_bytes: caches.iter().max().map_or(0, |c| c.1),
            }
        })
    }

    /// Read bandwidth of all cores together, in bytes per second. The
    /// first call measures it, which takes some tens of milliseconds.
    pub fn bandwidth(&self) -> f64 {
        static BANDWIDTH: OnceLock<f64> = OnceLock::new();
        *BANDWIDTH.get_or_init(|| {
            let bytes = (2 * self.cache_bytes as usize).clamp(MEASURED_BYTES.0, MEASURED_BYTES.1);
            let measured = read_bandwidth(self.cores as usize, bytes).unwrap_or(ASSUMED_BANDWIDTH);
            tracing::debug!(gb_per_second = measured / 1e9, "host read bandwidth");
            measured
        })
    }
}

/// Minimum and maximum bytes that the bandwidth measurement reads: beyond
/// most caches, but quick. If a cache is larger, the result
/// is the cache's bandwidth. Plans hardly depend on it, because all
/// CPU candidates read the same weights.
const MEASURED_BYTES: (usize, usize) = (32 << 20, 64 << 20);
/// Assumed bandwidth when the measurement cannot allocate
/// memory: one DDR4 channel.
const ASSUMED_BANDWIDTH: f64 = 1.5e10;
const ROUNDS: usize = 3;

/// Bytes per second that `threads` threads read together
/// from `bytes` bytes of memory.
///
/// Every thread compares the two halves of its part, all at
/// once; the slowest thread of the best round counts. Parts that
/// fit in a cache are read from the cache. `None` when
/// threads or memory cannot be allocated.
pub fn read_bandwidth(threads: usize, bytes: usize) -> Option<f64> {
    let half = (bytes / threads.max(1) / 2).max(1);
    // Each thread writes its pages first, on its memory node. Untouched
    // pages would all map to one zero page.
    let parts: Vec<(Buffer, Buffer)> = on_threads(threads, || filled(half).zip(filled(half)))?;
    let next = AtomicUsize::new(0);
    let gate = RwLock::new(());
    let closed = gate.write();
    let mut times: Vec<[f64; ROUNDS]> = Vec::new();
    thread::scope(|scope| {
        let workers: Option<Vec<_>> = (0..threads)
            .map(|_| {
                let read = || {
                    let (a, b) = &parts[next.fetch_add(1, Ordering::Relaxed)];
                    let opened = gate.read();
                    let times = [(); ROUNDS].map(|()| read_seconds(a, b));
                    drop(opened);
                    times
                };
                thread::Builder::new().spawn_scoped(scope, read).ok()
            })
            .collect();
        drop(closed);
        times = workers?.into_iter().filter_map(|w| w.join().ok()).collect();
        Some(())
    })?;
    let slowest = |round: usize| times.iter().map(|t| t[round]).fold(0.0, f64::max);
    let seconds = (0..ROUNDS).map(slowest).reduce(f64::min)?;
    (seconds > 0.0).then(|| (2 * half * times.len()) as f64 / seconds)
}

/// Results of `work` on `threads` concurrent threads, or `None` when
/// a thread or a result is missing.
fn on_threads<T: Send>(threads: usize, work: impl Fn() -> Option<T> + Sync) -> Option<Vec<T>> {
    thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| thread::Builder::new().spawn_scoped(scope, &work).ok()).collect();
        workers.into_iter().map(|w| w?.join().ok()?).collect()
    })
}

/// `memcmp` reads both halves with the C library's vector
/// code, in debug builds too.
fn read_seconds(a: &Buffer, b: &Buffer) -> f64 {
    let (a, b) = (HostMemory::bytes(a.into()), HostMemory::bytes(b.into()));
    let start = Instant::now();
    black_box(black_box(a) == black_box(b));
    start.elapsed().as_secs_f64()
}

fn filled(len: usize) -> Option<Buffer> {
    let mut buffer = HostMemory::allocate(DeviceId::CPU, len, "a measurement of bandwidth").ok()?;
    HostMemory::fill(DeviceId::CPU, (&mut buffer).into(), 1).ok()?;
    Some(buffer)
}

fn processor_name() -> Option<String> {
    let info = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = info.lines().find(|l| l.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

fn memory_bytes() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|l| l.strip_prefix("MemTotal:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}

/// (level, bytes) of the first core's data caches.
fn caches() -> Vec<(u32, u64)> {
    let cache = |index: u32| {
        let read = |file: &str| {
            std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index{index}/{file}")).ok()
        };
        let bytes = parse_size(read("size")?.trim())?;
        Some((read("type")?.trim() != "Instruction").then_some((read("level")?.trim().parse().ok()?, bytes)))
    };
    (0..).map_while(cache).flatten().collect()
}

/// Parses the Linux kernel's `48K`, `2048K`, `1M`.
fn parse_size(text: &str) -> Option<u64> {
    let (digits, shift) = match text.strip_suffix('K') {
        Some(digits) => (digits, 10),
        None => text.strip_suffix('M').map_or((text, 0), |digits| (digits, 20)),
    };
    Some(digits.parse::<u64>().ok()? << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_has_cores_and_plausible_bandwidth() {
        let host = Host::detect();
        assert!(host.cores >= 1 && !host.name.is_empty());
        assert!(host.cache_bytes >= host.l2_bytes);
        assert!((1e8..1e13).contains(&host.bandwidth()), "{}", host.bandwidth());
        assert_eq!(host.bandwidth(), host.bandwidth(), "measured once");
    }

    #[test]
    fn sizes_parse() {
        assert_eq!(parse_size("48K"), Some(48 << 10));
        assert_eq!(parse_size("260M"), Some(260 << 20));
        assert_eq!(parse_size("512"), Some(512));
        assert_eq!(parse_size("many"), None);
    }

    #[test]
    fn levels_have_distinct_names() {
        use SimdLevel::*;
        let names = [Scalar, Neon, Avx2, AvxVnni, Avx512, Avx512Vnni].map(SimdLevel::name);
        assert_eq!(names.iter().collect::<std::collections::HashSet<_>>().len(), names.len());
    }
}
