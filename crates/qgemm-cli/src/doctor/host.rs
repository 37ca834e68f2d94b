//! Program, processor, memory, and other work on the machine.

use std::env;
use std::fs;

use qgemm_api::{DeviceInfo, DeviceKind, DeviceListing};

use super::finding::Finding;
use crate::contention::load_average;
use crate::provenance;
use crate::table::bytes;

/// Number of threads of the CPU's kernels, if set.
const THREADS_VARIABLE: &str = "RAYON_NUM_THREADS";
/// Memory that `bench` rotates through on a CPU, twice.
const LEAST_MEMORY: u64 = 2 << 30;

/// Findings about the host.
pub fn findings(listed: &[DeviceListing]) -> Vec<Finding> {
    let program = format!("qgemm {} on {} {}", provenance::VERSION, env::consts::OS, env::consts::ARCH);
    let mut all = vec![Finding::ok("program", program)];
    let cpu = listed.iter().find_map(|listing| match listing {
        DeviceListing::Found(info) if info.id.kind == DeviceKind::Cpu => Some(info),
        _ => None,
    });
    match cpu {
        None => all.push(Finding::fail("cpu", "the CPU backend is missing", "nothing runs without it")),
        Some(info) => {
            all.push(processor(info));
            all.push(threads(info.units, env::var(THREADS_VARIABLE).ok().as_deref()));
            all.extend(load_average().map(|load| contention(load, info.units)));
        }
    }
    all.extend(available_memory().map(memory));
    all
}

fn processor(info: &DeviceInfo) -> Finding {
    let found = format!("{}, {}, last-level cache {}", info.name, info.arch, bytes(info.cache_bytes));
    match info.arch.as_str() {
        "scalar" => {
            Finding::warn("cpu", found, "no vector instructions that qgemm knows: kernels are many times slower")
        }
        _ => Finding::ok("cpu", found),
    }
}

fn threads(cores: u32, set: Option<&str>) -> Finding {
    let Some(text) = set.filter(|text| !text.is_empty()) else {
        return Finding::ok("threads", format!("{cores}, as many as cores for this process"));
    };
    let found = format!("{THREADS_VARIABLE}={text}, {cores} cores for this process");
    match text.parse::<u32>() {
        Err(_) => Finding::warn("threads", found, "expected a number: the variable is ignored"),
        Ok(threads) if threads > cores => {
            Finding::warn("threads", found, "threads that share a core wait for one another: set at most the cores")
        }
        Ok(threads) if threads != 0 && threads < cores => {
            Finding::warn("threads", found, "cores stay idle: unset it, unless that is the intention")
        }
        Ok(_) => Finding::ok("threads", found),
    }
}

fn contention(load: f64, cores: u32) -> Finding {
    let found = format!("load average {load:.1} on {cores} cores");
    match load > 0.5 * f64::from(cores) {
        true => Finding::warn("load", found, "other work slows everything down: do not measure now"),
        false => Finding::ok("load", found),
    }
}

fn memory(available: u64) -> Finding {
    let found = format!("{} available", bytes(available));
    match available < LEAST_MEMORY {
        true => Finding::warn("memory", found, "`qgemm bench` needs 2 GiB on a CPU, and models their size"),
        false => Finding::ok("memory", found),
    }
}

/// Bytes that programs can still allocate (Linux).
fn available_memory() -> Option<u64> {
    let info = fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}

#[cfg(test)]
mod tests {
    use super::super::finding::Status;
    use super::*;

    #[test]
    fn too_many_threads_and_much_load_are_warned_of() {
        let statuses =
            [None, Some(""), Some("8"), Some("0"), Some("9"), Some("4"), Some("x")].map(|set| threads(8, set).status);
        assert_eq!(
            statuses,
            [Status::Ok, Status::Ok, Status::Ok, Status::Ok, Status::Warn, Status::Warn, Status::Warn]
        );
        assert_eq!([contention(0.5, 8).status, contention(7.0, 8).status], [Status::Ok, Status::Warn]);
        assert_eq!([memory(8 << 30).status, memory(1 << 30).status], [Status::Ok, Status::Warn]);
    }
}
