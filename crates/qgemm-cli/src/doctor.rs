//! `qgemm doctor`: checks driver, compiler, caches, processor and load,
//! and says why each finding matters.

mod cuda;
mod environment;
mod finding;
mod host;

use qgemm_api::{DeviceKind, DeviceListing, Feature, devices};

use crate::holds::Holds;
use crate::out::Printing;
use crate::table;
use finding::{Finding, Status};

/// Runs the command. It holds if no finding is a failure.
///
/// # Errors
/// When printing fails.
pub fn run(printing: Printing) -> anyhow::Result<Holds> {
    let listed = devices();
    let mut findings = host::findings(&listed);
    findings.extend(cuda::findings(&listed));
    findings.extend(listed.iter().filter_map(other_device));
    findings.extend(environment::findings());
    let fails = findings.iter().any(|finding| finding.status == Status::Fail);
    table::print(findings, printing)?;
    Ok(if fails { Holds::No } else { Holds::Yes })
}

/// Adapters of wgpu, and the emulator.
fn other_device(listing: &DeviceListing) -> Option<Finding> {
    match listing {
        DeviceListing::Found(info) if info.id.kind == DeviceKind::Wgpu => {
            let found = format!("{}: {} ({}, {})", info.id, info.name, info.arch, info.driver);
            Some(match info.features.contains(&Feature::SoftwareAdapter) {
                true => Finding::warn("wgpu", found, "runs on the CPU: for tests; `auto` does not choose it"),
                false => Finding::ok("wgpu", found),
            })
        }
        DeviceListing::Absent { kind: DeviceKind::Wgpu, why } => {
            Some(Finding::warn("wgpu", why, "no GPU through Vulkan, Metal or DX12: install its driver to use one"))
        }
        // All emulated chips share one compiler.
        DeviceListing::Found(info) if info.id.to_string() == "emu:sm90" => {
            Some(Finding::ok("emulator", format!("runs CUDA kernels on the CPU, as {} and others", info.id)))
        }
        DeviceListing::Absent { kind: DeviceKind::Emu, why } => {
            Some(Finding::warn("emulator", why, "CUDA kernels cannot be tested without a GPU: install a C++ compiler"))
        }
        _ => None,
    }
}
