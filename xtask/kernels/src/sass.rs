//! Matrix instructions in machine code, and their correct use, according to
//! NVIDIA's disassembler if it is installed.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, thread};

use anyhow::{Context, bail, ensure};
use qgemm_cuda::{Target, build};
use xtask::workspace;

use crate::kernels_lock::Mma;
use crate::wgmma::{self, Instruction};

/// Names the disassembler or its folder.
const VARIABLE: &str = "QGEMM_NVDISASM";
const NAME: &str = if cfg!(windows) { "nvdisasm.exe" } else { "nvdisasm" };
/// Subfolders of a toolkit or of Python
/// packages that may hold it.
const SUBFOLDERS: [&str; 4] = ["bin", "nvidia/cu13/bin", "nvidia/cuda_nvdisasm/bin", "triton/backends/nvidia/bin"];
/// Bytes of an instruction since Volta.
const INSTRUCTION_BYTES: usize = 16;

/// NVIDIA's disassembler.
#[derive(Debug)]
pub struct Disassembler {
    path: PathBuf,
    /// Its help text, which lists the supported chips.
    help: String,
}

/// The disassembler's findings for a kernel.
#[derive(Clone, Debug)]
pub struct Code {
    /// Number of each matrix instruction.
    pub mma: Mma,
    /// Faults in their use.
    pub faults: Vec<String>,
}

impl Disassembler {
    /// Searches the disassembler: the user's, else the first
    /// working one of a CUDA toolkit, a Python package, or the
    /// path; `None` without one.
    ///
    /// # Errors
    /// When the user's path has none, or it does not run.
    pub fn find() -> anyhow::Result<Option<Self>> {
        match env::var_os(VARIABLE).filter(|v| !v.is_empty()) {
            Some(named) => Self::at(in_named(Path::new(&named))?).map(Some),
            None => Ok(candidates().into_iter().filter(|f| f.is_file()).find_map(|file| Self::at(file).ok())),
        }
    }

    fn at(path: PathBuf) -> anyhow::Result<Self> {
        let help = workspace::output(Command::new(&path).arg("--help"))?;
        Ok(Self { path, help })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it supports the chip.
    pub fn knows(&self, target: Target) -> bool {
        self.help.contains(&format!("'{}'", machine(target)))
    }

    /// Disassembles each of the `cubins`, machine code of
    /// `target` with one kernel each. Starting the program
    /// takes ten times as long as one kernel, so it is
    /// given the code of many at once.
    ///
    /// # Errors
    /// When a cubin has no code, or the program fails.
    pub fn read(&self, target: Target, cubins: &[&[u8]]) -> anyhow::Result<Vec<Code>> {
        let threads = thread::available_parallelism().map_or(1, |n| n.get());
        let share = cubins.len().div_ceil(threads).max(1);
        thread::scope(|scope| {
            let parts: Vec<_> =
                cubins.chunks(share).map(|part| scope.spawn(move || self.read_part(target, part))).collect();
            let mut all = Vec::new();
            for part in parts {
                let Ok(found) = part.join() else { bail!("a thread that disassembles stopped") };
                all.extend(found?);
            }
            Ok(all)
        })
    }

    fn read_part(&self, target: Target, cubins: &[&[u8]]) -> anyhow::Result<Vec<Code>> {
        let (mut code, mut ends) = (Vec::new(), Vec::new());
        for cubin in cubins {
            code.extend_from_slice(code_of(cubin).context("a cubin without code of a kernel")?);
            ends.push(code.len());
        }
        let file = tempfile::NamedTempFile::new()?;
        fs::write(&file, &code)?;
        let listing =
            workspace::output(Command::new(&self.path).args(["--binary", &machine(target)]).arg(file.path()))?;
        let kernels = split(&listing, &ends);
        let instructions: usize = kernels.iter().map(Vec::len).sum();
        ensure!(
            instructions == code.len() / INSTRUCTION_BYTES,
            "{} listed {instructions} of {} instructions",
            self.path.display(),
            code.len() / INSTRUCTION_BYTES
        );
        Ok(kernels.iter().map(|kernel| Code { mma: count(kernel), faults: wgmma::faults(kernel) }).collect())
    }
}

/// The program's name for the chip: `SM90a`.
fn machine(target: Target) -> String {
    target.to_string().replace("sm_", "SM")
}

/// The program at a user path: the file
/// itself, or in a folder.
fn in_named(named: &Path) -> anyhow::Result<PathBuf> {
    let files = [named.to_path_buf(), named.join(NAME), named.join("bin").join(NAME)];
    files
        .into_iter()
        .find(|file| file.is_file())
        .with_context(|| format!("{VARIABLE}={} holds no {NAME}", named.display()))
}

/// Candidate paths, best first.
fn candidates() -> Vec<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let toolkits = build::toolkits().into_iter().flat_map(|root| SUBFOLDERS.map(|folder| root.join(folder)));
    toolkits.chain(env::split_paths(&path)).map(|folder| folder.join(NAME)).collect()
}

/// Machine code in an ELF file: the section `.text.<kernel>` ("Executable
/// and Linkable Format", 64 bit, little endian).
fn code_of(cubin: &[u8]) -> Option<&[u8]> {
    let number = |at: usize, len: usize| -> Option<usize> {
        let bytes = cubin.get(at..at.checked_add(len)?)?;
        Some(bytes.iter().rev().fold(0usize, |value, &byte| value << 8 | usize::from(byte)))
    };
    let (sections, size, count, names) = (number(0x28, 8)?, number(0x3a, 2)?, number(0x3c, 2)?, number(0x3e, 2)?);
    let bytes_of = |index: usize| -> Option<(usize, &[u8])> {
        let header = sections.checked_add(index.checked_mul(size)?)?;
        let (offset, len) = (number(header.checked_add(0x18)?, 8)?, number(header.checked_add(0x20)?, 8)?);
        Some((number(header, 4)?, cubin.get(offset..offset.checked_add(len)?)?))
    };
    let (_, names) = bytes_of(names)?;
    (0..count).find_map(|index| {
        let (name, bytes) = bytes_of(index)?;
        names.get(name..)?.starts_with(b".text.").then_some(bytes)
    })
}

/// Instructions of a listing, split by the kernels that
/// end at the offsets `ends`.
fn split<'a>(listing: &'a str, ends: &[usize]) -> Vec<Vec<Instruction<'a>>> {
    let mut kernels = vec![Vec::new(); ends.len()];
    for line in listing.lines() {
        let Some((offset, rest)) = line.trim_start().strip_prefix("/*").and_then(|l| l.split_once("*/")) else {
            continue;
        };
        let Ok(offset) = usize::from_str_radix(offset, 16) else { continue };
        let text = rest.split(';').next().unwrap_or_default().trim();
        let text = match text.strip_prefix('@') {
            Some(predicated) => predicated.split_once(' ').map_or("", |(_, text)| text.trim_start()),
            None => text,
        };
        if let Some(kernel) = kernels.get_mut(ends.partition_point(|&end| end <= offset)) {
            kernel.push(Instruction { offset, text });
        }
    }
    kernels
}

/// A kernel's matrix instructions.
fn count(kernel: &[Instruction<'_>]) -> Mma {
    let mut found = Mma::new();
    for Instruction { text, .. } in kernel {
        let opcode = text.split_whitespace().next().unwrap_or_default();
        if opcode.split('.').next().is_some_and(|name| name.ends_with("MMA")) {
            *found.entry(opcode.to_owned()).or_default() += 1;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_are_counted_by_kernel() {
        let listing = "\t.headerflags\t@\"EF_CUDA_SM80\"\n\
                       \x20       /*0000*/                   HMMA.16816.F32 R4, R8, R10, R4 ;\n\
                       \x20       /*0010*/              @!P0 HMMA.16816.F32 R4, R8, R10, R4 ;\n\
                       \x20       /*0020*/                   IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;\n\
                       \x20       /*0030*/                   EXIT ;\n\
                       \x20       /*0040*/                   HGMMA.64x32x16.F32 R24, R4, gdesc[UR4], R24 ;\n";
        let kernels = split(listing, &[0x20, 0x30, 0x50]);
        assert_eq!(kernels.iter().map(Vec::len).collect::<Vec<_>>(), [2, 1, 2]);
        assert_eq!(kernels[0][1].text, "HMMA.16816.F32 R4, R8, R10, R4");
        let found: Vec<_> = kernels.iter().map(|kernel| count(kernel)).collect();
        assert_eq!(found[0], Mma::from([("HMMA.16816.F32".to_owned(), 2)]));
        assert!(found[1].is_empty());
        assert_eq!(found[2], Mma::from([("HGMMA.64x32x16.F32".to_owned(), 1)]));
    }

    #[test]
    fn code_is_found_in_a_cubin() {
        assert_eq!(code_of(b""), None);
        assert_eq!(code_of(&[0xff; 200]), None);
        // Header, section names, code, then two section headers.
        let mut elf = vec![0u8; 64];
        elf.extend_from_slice(b"\0.shstrtab\0.text.kernel\0code");
        let (names, code, sections) = (64usize, elf.len() - 4, elf.len());
        for (name, offset, len) in [(1u32, names, 24usize), (11, code, 4)] {
            let mut header = vec![0u8; 64];
            header[..4].copy_from_slice(&name.to_le_bytes());
            header[0x18..0x20].copy_from_slice(&offset.to_le_bytes());
            header[0x20..0x28].copy_from_slice(&len.to_le_bytes());
            elf.extend_from_slice(&header);
        }
        elf[0x28..0x30].copy_from_slice(&sections.to_le_bytes());
        elf[0x3a..0x3c].copy_from_slice(&64u16.to_le_bytes());
        elf[0x3c..0x3e].copy_from_slice(&2u16.to_le_bytes());
        assert_eq!(code_of(&elf), Some(b"code".as_slice()));
    }

    #[test]
    fn a_named_path_without_it_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let why = in_named(folder.path()).unwrap_err().to_string();
        assert!(why.contains(VARIABLE) && why.contains(NAME), "{why}");
        fs::create_dir(folder.path().join("bin")).unwrap();
        let file = folder.path().join("bin").join(NAME);
        fs::write(&file, b"").unwrap();
        assert_eq!(in_named(folder.path()).unwrap(), file);
        assert_eq!(in_named(&file).unwrap(), file);
    }
}
