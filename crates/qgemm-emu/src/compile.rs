//! Building a kernel with the host's C++ compiler, once: shared objects are kept in the user's cache.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use qgemm_cuda::{KernelSpec, Sha256Hash};
use qgemm_hal::HalError;
use tempfile::TempDir;

use crate::sources;

/// Names the C++ compiler: `QGEMM_CXX=clang++`.
pub(crate) const COMPILER_VARIABLE: &str = "QGEMM_CXX";

/// Debugging a kernel is what the emulator is for, but its sources are mostly templates, which are slow without any
/// optimization. `-O1` takes half as long again to compile, and a kernel runs for less time than that in most tests.
/// Contraction as NVIDIA's compiler does it where the host's does it at this level: clang, not GCC.
const FLAGS: &[&str] = &[
    "-std=c++17",
    "-Og",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-strict-aliasing",
    "-ffp-contract=fast",
    "-w",
];

/// A compiler that works here.
#[derive(Debug)]
pub(crate) struct Compiler {
    program: String,
    /// Program, version and flags: part of every cache key.
    identity: String,
    flags: Vec<&'static str>,
    folder: Folder,
    sources: PathBuf,
}

/// Where shared objects are kept.
#[derive(Debug)]
enum Folder {
    Cache(PathBuf),
    /// For this process only, where the cache cannot be written.
    Temporary(TempDir),
}

impl Folder {
    fn path(&self) -> &Path {
        match self {
            Folder::Cache(path) => path,
            Folder::Temporary(folder) => folder.path(),
        }
    }
}

impl Compiler {
    /// The compiler of this machine, looked for once.
    ///
    /// # Errors
    /// What to install.
    pub(crate) fn get() -> Result<&'static Self, String> {
        static COMPILER: OnceLock<Result<Compiler, String>> = OnceLock::new();
        COMPILER.get_or_init(Self::find).as_ref().map_err(Clone::clone)
    }

    fn find() -> Result<Self, String> {
        let named = |variable| std::env::var(variable).ok().filter(|v: &String| !v.is_empty());
        let candidates = match named(COMPILER_VARIABLE) {
            Some(program) => vec![program],
            None => named("CXX").into_iter().chain(["c++", "g++", "clang++"].map(str::to_owned)).collect(),
        };
        let version = |program: &String| {
            let output = Command::new(program).arg("--version").stderr(Stdio::null()).output().ok()?;
            output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
        };
        let found = candidates.iter().find_map(|program| Some((program.clone(), version(program)?)));
        let (program, version) = found.ok_or_else(|| {
            format!(
                "emulation compiles kernels with the host's C++ compiler, and none runs here (tried {}): install g++ or \
                 clang, or name one in `{COMPILER_VARIABLE}`",
                candidates.join(", ")
            )
        })?;
        let mut flags = FLAGS.to_vec();
        flags.extend(host_flags());
        let mut text = format!("{program}\n{version}\n{}", flags.join(" "));
        for (name, source) in sources::files() {
            text += name;
            text += source;
        }
        let identity = Sha256Hash::of(text.as_bytes()).to_string();
        let folder = folder();
        let sources = write_sources(folder.path(), &identity)
            .map_err(|e| format!("{}: kernel sources cannot be written: {e}", folder.path().display()))?;
        Ok(Self { program, identity, flags, folder, sources })
    }

    /// The shared object of `spec`.
    ///
    /// # Errors
    /// [`HalError::Compile`] with the compiler's words, or [`HalError::File`].
    pub(crate) fn shared_object(&self, spec: &KernelSpec) -> Result<PathBuf, HalError> {
        let unit = sources::translation_unit(spec);
        let note = self.path(&[&self.identity, &unit], "note");
        if let Some(object) = self.noted(&note) {
            return Ok(object);
        }
        let _span = tracing::info_span!("compile", kernel = spec.name, target = "host").entered();
        // Kernels of different variants are often the same after preprocessing, and compiled once then.
        let text = self.run(spec, &["-E", "-I.", "-x", "c++"], None, unit.as_bytes())?;
        let object = self.path(&[&self.identity, &String::from_utf8_lossy(&text)], "so");
        if !object.exists() {
            let failed = |e: io::Error| file_error(&object, "write a shared object", &e);
            let parts = tempfile::Builder::new().suffix(".so").tempfile_in(self.folder.path()).map_err(failed)?;
            self.run(spec, &["-x", "c++-cpp-output"], Some(parts.path()), &text)?;
            parts.persist(&object).map_err(|e| failed(e.error))?;
        }
        self.note(&note, &object).map_err(|e| file_error(&note, "write", &e))?;
        Ok(object)
    }

    fn path(&self, key: &[&str], extension: &str) -> PathBuf {
        let hash = Sha256Hash::of(key.join("\0").as_bytes());
        self.folder.path().join(format!("{hash}.{extension}"))
    }

    /// The object that a note names, when it is whole.
    fn noted(&self, note: &Path) -> Option<PathBuf> {
        let text = fs::read_to_string(note).ok()?;
        let (name, hash) = text.split_once('\n')?;
        let object = self.folder.path().join(name);
        let bytes = fs::read(&object).ok()?;
        if Sha256Hash::of(&bytes).to_string() == hash {
            return Some(object);
        }
        tracing::warn!(object = %object.display(), "a damaged kernel is compiled again");
        // Compiled anew under the same name; that it may be gone already is no matter.
        let _ = fs::remove_file(&object);
        None
    }

    fn note(&self, note: &Path, object: &Path) -> io::Result<()> {
        let hash = Sha256Hash::of(&fs::read(object)?);
        let name = object.file_name().unwrap_or_default().to_string_lossy();
        let mut file = tempfile::NamedTempFile::new_in(self.folder.path())?;
        write!(file, "{name}\n{hash}")?;
        file.persist(note).map(drop).map_err(|e| e.error)
    }

    /// Runs the compiler on `text`.
    fn run(&self, spec: &KernelSpec, extra: &[&str], out: Option<&Path>, text: &[u8]) -> Result<Vec<u8>, HalError> {
        let mut command = Command::new(&self.program);
        command.args(&self.flags).args(extra).arg("-").current_dir(&self.sources);
        if let Some(out) = out {
            command.arg("-o").arg(out);
        }
        let fail = |log: String| HalError::Compile {
            kernel: spec.name.clone(),
            target: "the host (emulation)".into(),
            options: self.flags.join(" "),
            log,
        };
        let io = |e: io::Error| fail(format!("{}: {e}", self.program));
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(io)?;
        let stdin = child.stdin.take();
        let text = text.to_vec();
        // Written aside, or both might wait for the other to read.
        let writer = std::thread::spawn(move || stdin.map_or(Ok(()), |mut stdin| stdin.write_all(&text)));
        let output = child.wait_with_output().map_err(io)?;
        if !output.status.success() {
            return Err(fail(String::from_utf8_lossy(&output.stderr).into_owned()));
        }
        match writer.join() {
            Ok(written) => written.map_err(io)?,
            Err(_) => return Err(fail("the source could not be handed over".into())),
        }
        Ok(output.stdout)
    }
}

fn file_error(path: &Path, call: &'static str, error: &io::Error) -> HalError {
    HalError::File { path: path.to_owned(), call, message: error.to_string() }
}

/// Instructions of this host that make half precision and fused multiply-adds fast.
fn host_flags() -> Vec<&'static str> {
    #[cfg(target_arch = "x86_64")]
    {
        let has = [
            ("-mavx2", std::arch::is_x86_feature_detected!("avx2")),
            ("-mfma", std::arch::is_x86_feature_detected!("fma")),
            ("-mf16c", std::arch::is_x86_feature_detected!("f16c")),
        ];
        has.into_iter().filter(|(_, has)| *has).map(|(flag, _)| flag).collect()
    }
    #[cfg(not(target_arch = "x86_64"))]
    Vec::new()
}

/// The user's cache, or a folder of this process.
fn folder() -> Folder {
    if let Some(path) = qgemm_cuda::cache_folder().map(|path| path.join("emu")) {
        let writable = fs::create_dir_all(&path).and_then(|()| tempfile::tempfile_in(&path).map(drop));
        match writable {
            Ok(()) => return Folder::Cache(path),
            Err(error) => tracing::warn!(folder = %path.display(), %error, "emulated kernels are not kept"),
        }
    }
    match TempDir::with_prefix("qgemm-emu-") {
        Ok(folder) => Folder::Temporary(folder),
        // Nothing can be written anywhere: the first attempt to will say so.
        Err(_) => Folder::Cache(std::env::temp_dir()),
    }
}

/// Writes the sources below `folder`, beside the goal and renamed, so that another process sees all or nothing.
fn write_sources(folder: &Path, identity: &str) -> io::Result<PathBuf> {
    let goal = folder.join(format!("sources-{identity}"));
    if goal.is_dir() {
        return Ok(goal);
    }
    let parts = TempDir::with_prefix_in("parts-", folder)?;
    sources::write(parts.path())?;
    let renamed = fs::rename(parts.path(), &goal);
    if renamed.is_ok() {
        // What it would delete has moved.
        let _ = parts.keep();
    }
    // Another process may have been first.
    if goal.is_dir() { Ok(goal) } else { renamed.map(|()| goal) }
}
