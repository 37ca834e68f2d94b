//! Kernel compilation from a [`KernelSpec`].

use qgemm_hal::HalError;

use crate::artifact::{Artifact, Resources};
use crate::nvrtc::{Nvrtc, NvrtcError};
use crate::source;
use crate::spec::KernelSpec;
use crate::target::Target;

/// Compiler options besides the target.
pub(crate) fn options(target: Target) -> Vec<String> {
    let mut options = vec!["--std=c++17".to_owned(), "-default-device".to_owned()];
    if !target.is_ptx() {
        // Makes the log report registers and spills.
        options.push("--ptxas-options=-v".to_owned());
    }
    options
}

/// Compilation target of a kernel for machines with `target`: the same,
/// or the chip-specific one.
pub(crate) fn target_of(spec: &KernelSpec, target: Target) -> Target {
    target.with_specific(spec.arch_specific)
}

/// Compiles `spec` for exactly `target`.
pub(crate) fn compile(nvrtc: &Nvrtc, spec: &KernelSpec, target: Target) -> Result<Artifact, HalError> {
    let _span = tracing::info_span!("compile", kernel = spec.name, %target).entered();
    let options = options(target);
    let fail = |options: String, log: String| HalError::Compile {
        kernel: spec.name.clone(),
        target: target.to_string(),
        options,
        log,
    };
    if let Some(undefined) = source::undefined_name(&spec.prelude, spec.text) {
        return Err(fail(options.join(" "), undefined.to_string()));
    }
    let text = format!("{}\n#line 1 \"{}\"\n{}", spec.prelude, spec.entry, spec.text);
    let headers = source::included(&spec.prelude, spec.text);
    let compiled = nvrtc.compile(&spec.name, &text, &headers, &options, target).map_err(|e| match e {
        NvrtcError::Compile { options, log } => fail(options, log),
        NvrtcError::UnsupportedTarget { .. } | NvrtcError::Missing { .. } => {
            HalError::KernelUnavailable { kernel: spec.name.clone(), target: target.to_string(), why: e.to_string() }
        }
        NvrtcError::Call { .. } => fail(options.join(" "), e.to_string()),
    })?;
    if compiled.log.contains("warning") {
        tracing::debug!(log = compiled.log, "remarks of the compiler");
    }
    let resources = (!target.is_ptx()).then(|| Resources::from_log(&compiled.log));
    Ok(Artifact { target, nvrtc: nvrtc.version().to_owned(), resources, image: compiled.image })
}

#[cfg(test)]
pub(crate) mod tests {
    use std::time::Instant;

    use qgemm_hal::Variant;

    use super::*;

    /// Compiler. `None` without one: then the test is skipped with the reason.
    pub(crate) fn nvrtc_or_skip(test: &str) -> Option<&'static Nvrtc> {
        match Nvrtc::get() {
            Ok(nvrtc) => Some(nvrtc),
            Err(why) => {
                qgemm_testkit::skipped(test, &why.to_string());
                None
            }
        }
    }

    pub(crate) fn probe(prelude: &str) -> KernelSpec {
        KernelSpec {
            name: "read_probe".into(),
            entry: "entry/read_probe.cu",
            text: source::entry("entry/read_probe.cu"),
            symbol: "read_probe",
            prelude: prelude.into(),
            arch_specific: false,
        }
    }

    #[test]
    fn compiles_for_every_generation() {
        let Some(nvrtc) = nvrtc_or_skip("compiles_for_every_generation") else { return };
        for target in ["sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_120a"] {
            let target: Target = target.parse().unwrap();
            if !nvrtc.supported().contains(&target.arch()) {
                let why = format!("NVRTC {} does not know it", nvrtc.version());
                qgemm_testkit::skipped(&format!("compiles_for_every_generation {target}"), &why);
                continue;
            }
            let artifact = compile(nvrtc, &probe(""), target).unwrap();
            assert_eq!(&artifact.image[..4], b"\x7fELF", "{target}");
            let resources = artifact.resources.unwrap();
            assert!(resources.registers > 8 && resources.spill_bytes == 0, "{target}: {resources:?}");
        }
    }

    /// CPU seconds of this thread, or elapsed time if the system does not report them.
    /// Other work must not fail a test.
    fn seconds_of_thread(start: Instant) -> f64 {
        let counted = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
        let nanoseconds = counted.and_then(|text| text.split(' ').next()?.parse::<u64>().ok());
        nanoseconds.map_or(start.elapsed().as_secs_f64(), |n| n as f64 * 1e-9)
    }

    /// The limit is in times of a kernel of a few lines: processors differ, and share their cores.
    #[test]
    fn the_slowest_kernels_compile_within_seconds() {
        const TIMES: std::ops::Range<f64> = 2.0..250.0;
        let Some(nvrtc) = nvrtc_or_skip("the_slowest_kernels_compile_within_seconds") else { return };
        let seconds = |spec: &KernelSpec, arch| {
            let start = Instant::now();
            let before = seconds_of_thread(start);
            compile(nvrtc, spec, target_of(spec, Target::Cubin { arch, specific: false })).unwrap();
            seconds_of_thread(start) - before
        };
        let of = |variant, main_loop: &'static str, m: &'static str| {
            let parts = [main_loop, ",w=q2_k,x=f16,", m];
            crate::manifest(variant).into_iter().filter(move |spec| parts.iter().all(|part| spec.name.contains(part)))
        };
        let for_volta = of(Variant::Sm70, "=sm70_two_stage", "m=").map(|spec| (spec, 70));
        let slow: Vec<_> =
            for_volta.chain(of(Variant::Sm90, "=sm90_wgmma_ws", ",m=128,").map(|spec| (spec, 90))).collect();
        assert!(slow.iter().any(|(_, arch)| *arch == 70) && slow.iter().any(|(_, arch)| *arch == 90));
        for (spec, arch) in slow {
            let little = seconds(&probe(""), arch);
            let took = seconds(&spec, arch);
            assert!(TIMES.contains(&(took / little)), "{}: {took:.2} s, beside {little:.3} s of little", spec.name);
        }
    }

    #[test]
    fn ptx_is_text_that_ends_in_a_zero_byte() {
        let Some(nvrtc) = nvrtc_or_skip("ptx_is_text_that_ends_in_a_zero_byte") else { return };
        let artifact = compile(nvrtc, &probe(""), Target::Ptx { arch: 80, specific: false }).unwrap();
        let (zero, text) = artifact.image.split_last().unwrap();
        assert!(*zero == 0 && artifact.resources.is_none());
        assert!(std::str::from_utf8(text).unwrap().contains(".target sm_80"));
    }

    #[test]
    fn a_mistake_is_reported_with_the_log_and_the_file() {
        let Some(nvrtc) = nvrtc_or_skip("a_mistake_is_reported_with_the_log_and_the_file") else { return };
        let wrong = probe("#define stride no_such_scope::stride\n");
        let error = compile(nvrtc, &wrong, Target::Ptx { arch: 80, specific: false }).unwrap_err();
        let HalError::Compile { kernel, target, options, log } = &error else { panic!("{error}") };
        assert_eq!((kernel.as_str(), target.as_str()), ("read_probe", "compute_80"));
        assert!(options.contains("--gpu-architecture=compute_80"), "{options}");
        let line = 1 + wrong.text.lines().position(|line| line.contains(" stride =")).expect("the entry has a stride");
        assert!(log.contains("namespace name") && log.contains(&format!("entry/read_probe.cu({line})")), "{log}");
    }

    #[test]
    fn an_unknown_chip_is_an_error() {
        let Some(nvrtc) = nvrtc_or_skip("an_unknown_chip_is_an_error") else { return };
        let error = compile(nvrtc, &probe(""), Target::Ptx { arch: 999, specific: false }).unwrap_err();
        assert!(matches!(&error, HalError::KernelUnavailable { why, .. } if why.contains("compute_999")), "{error}");
    }
}
