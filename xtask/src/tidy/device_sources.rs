//! Rules for CUDA sources: inline PTX is in `atoms/`, only the
//! prelude chooses the variant, and files include only lower layers.

use std::path::Path;

use super::finding::{Finding, Source};

const KERNELS: &str = "crates/qgemm-cuda/kernels";

/// Kernel folders from the lowest layer up. A file may include
/// its own folder and lower ones.
const FLOORS: &[&str] =
    &["atoms", "generated", "dequant", "sched", "mainloop", "attention", "epilogue", "recurrence", "entry"];

/// Checks every file in the kernels folder.
pub fn check(sources: &[Source]) -> Vec<Finding> {
    let is_kernel = |path: &Path| path.extension().is_some_and(|e| e == "cu" || e == "cuh");
    let kernels = sources.iter().filter(|s| s.path.starts_with(KERNELS) && is_kernel(&s.path));
    kernels.flat_map(kernel).collect()
}

fn kernel(source: &Source) -> Vec<Finding> {
    let inner = source.path.strip_prefix(KERNELS).unwrap_or(&source.path);
    let folder = inner.parent().and_then(|p| p.iter().next()).and_then(|f| f.to_str()).unwrap_or_default();
    let mut findings = Vec::new();
    let Some(floor) = FLOORS.iter().position(|floor| *floor == folder) else {
        let what = format!("lies in no folder that the include rules know; add it to {}", file!());
        return vec![Finding::in_file(&source.path, what)];
    };
    let below = &FLOORS[..floor];
    for (i, line) in source.text.lines().enumerate() {
        let code = line.split("//").next().unwrap_or_default();
        let mut report = |what: String| findings.push(Finding::at(&source.path, i + 1, what));
        let words = || code.split(|c: char| !c.is_alphanumeric() && c != '_');
        if folder != "atoms" && words().any(|w| w == "asm") {
            report("inline PTX outside of atoms/".into());
        }
        if words().any(|w| w == "__CUDA_ARCH__") {
            report("chooses by __CUDA_ARCH__; QG_VARIANT of the prelude decides".into());
        }
        if let Some(included) = code.trim_start().strip_prefix("#include") {
            let included = included.trim();
            let name = included.trim_matches('"');
            let target = name.split('/').next().unwrap_or_default();
            // The prelude names the format's file: QG_DEQUANT_FILE.
            if included.starts_with("QG_") {
                continue;
            }
            if !included.starts_with('"') {
                report(format!("includes {included}; kernels use no header but their own"));
            } else if target == ".." || !name.contains('/') {
                report(format!("includes {included}; name it from the kernels' root: \"<folder>/<file>\""));
            } else if target != folder && !below.contains(&target) {
                report(format!("{folder}/ may not include {target}/; it may include {below:?}"));
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(path: &str, text: &str) -> usize {
        kernel(&Source { path: Path::new(KERNELS).join(path), text: text.into() }).len()
    }

    #[test]
    fn asm_belongs_to_atoms() {
        assert_eq!(findings("atoms/a.cuh", "asm volatile(\"\");"), 0);
        assert_eq!(findings("dequant/a.cuh", "asm volatile(\"\");"), 1);
        assert_eq!(findings("dequant/a.cuh", "// no asm here"), 0);
    }

    #[test]
    fn includes_point_downwards() {
        assert_eq!(findings("entry/gemv.cu", "#include \"dequant/q4_0.cuh\""), 0);
        assert_eq!(findings("dequant/operand.cuh", "#include QG_DEQUANT_FILE"), 0);
        assert_eq!(findings("atoms/a.cuh", "#include \"dequant/q4_0.cuh\""), 1);
        assert_eq!(findings("entry/gemv.cu", "#include <cuda_fp16.h>"), 1);
        assert_eq!(findings("entry/gemv.cu", "#include \"../atoms/a.cuh\""), 1);
        assert_eq!(findings("misc/a.cuh", ""), 1);
    }

    #[test]
    fn the_prelude_chooses_the_variant() {
        assert_eq!(findings("atoms/a.cuh", "#if __CUDA_ARCH__ >= 800"), 1);
    }
}
