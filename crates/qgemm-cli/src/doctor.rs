//! `qgemm doctor`: what of this machine qgemm can use, what is missing or
//! busy, and why it matters.

mod cuda;
mod environment;
mod host;

use qgemm_api::{DeviceKind, DeviceListing, Feature, devices};
use serde::Serialize;

use crate::holds::Holds;
use crate::out::Printing;
use crate::table::{self, Column, Row, words};

/// Judgement of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Status {
    /// As it should be, or not needed here.
    Ok,
    /// Works, but slower or with less.
    Warn,
    /// Something that is there or was asked for does not work.
    Fail,
}

/// One line of the result.
#[derive(Clone, Debug, Serialize)]
struct Finding {
    subject: &'static str,
    status: Status,
    found: String,
    /// Why it matters and what to do; unless all is well.
    advice: Option<String>,
}

impl Finding {
    fn ok(subject: &'static str, found: impl Into<String>) -> Self {
        Self { subject, status: Status::Ok, found: found.into(), advice: None }
    }

    fn warn(subject: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { subject, status: Status::Warn, found: found.into(), advice: Some(advice.into()) }
    }

    fn fail(subject: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { subject, status: Status::Fail, found: found.into(), advice: Some(advice.into()) }
    }
}

impl Row for Finding {
    const COLUMNS: &'static [Column] =
        &[words("", 4), words("subject", 13), words("found", 64), words("why it matters, and what to do", 0)];

    fn cells(&self) -> Vec<String> {
        let status = match self.status {
            Status::Ok => "ok",
            Status::Warn => "warn",
            Status::Fail => "FAIL",
        };
        vec![status.to_owned(), self.subject.to_owned(), self.found.clone(), self.advice.clone().unwrap_or_default()]
    }
}

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
