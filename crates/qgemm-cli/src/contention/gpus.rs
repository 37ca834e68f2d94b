//! State of NVIDIA GPUs, as `nvidia-smi` reports it.

use std::io::Read as _;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// State of a GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpu {
    /// As `nvidia-smi` numbers it; CUDA may number otherwise.
    pub index: String,
    pub name: String,
    /// Share of time that kernels ran lately.
    pub utilization: Option<f64>,
    pub sm_mhz: Option<f64>,
    pub most_sm_mhz: Option<f64>,
    /// Why the clock is lower than requested, such as `thermal`.
    pub throttled: Vec<&'static str>,
    /// Other processes with memory on it.
    pub processes: Vec<u32>,
}

const QUERY: &str =
    "--query-gpu=uuid,index,name,utilization.gpu,clocks.sm,clocks.max.sm,clocks_throttle_reasons.active";
/// Bits of `clocks_throttle_reasons.active` that slow kernels down.
const REASONS: [(u64, &str); 5] = [
    (0x4, "power cap"),
    (0x8, "hardware slowdown"),
    (0x20, "thermal"),
    (0x40, "hardware thermal"),
    (0x80, "power brake"),
];

/// The GPUs; none without `nvidia-smi`.
pub fn gpus() -> Vec<Gpu> {
    let Some(states) = nvidia_smi(&[QUERY, "--format=csv,noheader,nounits"]) else { return Vec::new() };
    let processes = nvidia_smi(&["--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader,nounits"]);
    parse(&states, &processes.unwrap_or_default(), std::process::id())
}

impl Gpu {
    /// Contention that slows measurements down, in words.
    pub fn contention(&self) -> Option<String> {
        let mut parts = Vec::new();
        if !self.processes.is_empty() {
            let pids = self.processes.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
            parts.push(format!("other processes ({pids})"));
        }
        if !self.throttled.is_empty() {
            parts.push(format!("throttled ({})", self.throttled.join(", ")));
        }
        (!parts.is_empty()).then(|| format!("GPU {} of nvidia-smi ({}): {}", self.index, self.name, parts.join(", ")))
    }
}

fn parse(states: &str, processes: &str, own: u32) -> Vec<Gpu> {
    let fields = |line: &str| line.split(',').map(|field| field.trim().to_owned()).collect::<Vec<_>>();
    let processes: Vec<Vec<String>> = processes.lines().map(fields).collect();
    let gpu = |line: &str| {
        let fields = fields(line);
        let [uuid, index, name, utilization, clock, most, reasons] = fields.as_slice() else { return None };
        let bits = u64::from_str_radix(reasons.trim_start_matches("0x"), 16).unwrap_or(0);
        let of_gpu = processes.iter().filter(|process| process.first() == Some(uuid));
        let pids = of_gpu.filter_map(|process| process.get(1)?.parse().ok());
        Some(Gpu {
            index: index.clone(),
            name: name.clone(),
            utilization: utilization.parse::<f64>().ok().map(|percent| percent / 100.0),
            sm_mhz: clock.parse().ok(),
            most_sm_mhz: most.parse().ok(),
            throttled: REASONS.iter().filter(|(bit, _)| bits & bit != 0).map(|(_, reason)| *reason).collect(),
            processes: pids.filter(|&pid| pid != own).collect(),
        })
    };
    states.lines().filter_map(gpu).collect()
}

/// Output of `nvidia-smi`; `None` if it fails, or takes seconds, as with
/// a driver that hangs.
fn nvidia_smi(arguments: &[&str]) -> Option<String> {
    const PATIENCE: Duration = Duration::from_secs(5);
    const MOST_BYTES: u64 = 1 << 20;
    let mut command = Command::new("nvidia-smi");
    let mut child =
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().ok()?;
    let mut output = child.stdout.take()?.take(MOST_BYTES);
    let reader = thread::spawn(move || {
        let mut text = String::new();
        output.read_to_string(&mut text).ok().map(|_| text)
    });
    let end = Instant::now() + PATIENCE;
    loop {
        match child.try_wait().ok()? {
            Some(status) if status.success() => return reader.join().ok()?,
            Some(_) => return None,
            None if Instant::now() < end => thread::sleep(Duration::from_millis(10)),
            None => {
                let _ = child.kill();
                let _ = child.wait();
                return None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_parse() {
        let states = "GPU-1, 0, NVIDIA H200, 0, 1980, 1980, 0x0000000000000001\n\
                      GPU-2, 1, NVIDIA H200, 97, 1305, 1980, 0x0000000000000024\n\
                      GPU-3, 2, NVIDIA H200, [N/A], [N/A], [N/A], [N/A]\nnonsense\n";
        let gpus = parse(states, "GPU-2, 11\nGPU-2, 42\nGPU-1, 42\n", 42);
        assert_eq!(gpus.len(), 3);
        assert_eq!((gpus[0].contention(), gpus[0].sm_mhz), (None, Some(1980.0)));
        assert_eq!(gpus[1].processes, [11]);
        let text = gpus[1].contention().expect("busy");
        assert!(
            text.contains("GPU 1 of") && text.contains("processes (11)") && text.contains("power cap, thermal"),
            "{text}"
        );
        assert_eq!((gpus[2].utilization, gpus[2].contention()), (None, None));
    }
}
