//! Compilation of kernels with the host's C++ compiler. Shared objects are
//! kept in the user's cache, if it is usable.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use qgemm_cuda::{KernelSpec, Sha256Hash, source};
use qgemm_hal::HalError;
use tempfile::TempDir;

use crate::objects::{Objects, temporary_folder};
use crate::sources;

/// Names the C++ compiler: `QGEMM_CXX=clang++`.
pub(crate) const COMPILER_VARIABLE: &str = "QGEMM_CXX";

/// The emulator is for debugging kernels, but their sources are
/// mostly templates, which are slow without optimization. `-O1`
/// compiles half as long again, which most tests do not win
/// back. FMA contraction is on as in NVIDIA's compiler; at this
/// level clang does it, GCC does not.
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

/// A working compiler.
#[derive(Debug)]
pub(crate) struct Compiler {
    program: String,
    /// Program, version and flags; part of every cache key.
    identity: String,
    flags: Vec<&'static str>,
    /// Folder of the shared objects.
    cache: Option<PathBuf>,
    /// Whether the missing cache has been reported.
    warned: AtomicBool,
}

/// A shared object.
#[derive(Debug)]
pub(crate) struct Object {
    path: PathBuf,
    /// Removed after the object is loaded.
    _temporary: Option<TempDir>,
}

impl Object {
    /// Path of the object, valid as long as this value lives.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// Why there is no shared object.
enum Failure {
    /// An error of the kernel or the compiler.
    Kernel(HalError),
    /// The cache folder is unusable.
    Folder(io::Error),
}

impl From<HalError> for Failure {
    fn from(error: HalError) -> Self {
        Failure::Kernel(error)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Failure::Folder(error)
    }
}

impl Compiler {
    /// The compiler of this machine, searched once.
    ///
    /// # Errors
    /// A message that says what to install.
    pub(crate) fn get() -> Result<&'static Self, String> {
        static COMPILER: OnceLock<Result<Compiler, String>> = OnceLock::new();
        let find = || Self::find(qgemm_cuda::cache_folder().map(|path| path.join("emu")));
        COMPILER.get_or_init(find).as_ref().map_err(Clone::clone)
    }

    fn find(cache: Option<PathBuf>) -> Result<Self, String> {
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
        Ok(Self { program, identity, flags, cache, warned: AtomicBool::new(false) })
    }

    /// The shared object of `spec`, from the cache or compiled into
    /// it. When the cache is not writable or not trusted, the
    /// object is in a temporary folder, which is removed with it.
    ///
    /// # Errors
    /// [`HalError::Compile`] with the compiler's log, or [`HalError::File`].
    pub(crate) fn shared_object(&self, spec: &KernelSpec) -> Result<Object, HalError> {
        if let Some(folder) = &self.cache {
            match self.cached(folder, spec) {
                Ok(path) => return Ok(Object { path, _temporary: None }),
                Err(Failure::Kernel(error)) => return Err(error),
                Err(Failure::Folder(error)) => {
                    if !self.warned.swap(true, Ordering::Relaxed) {
                        tracing::warn!(folder = %folder.display(), %error, "emulated kernels are not kept");
                    }
                }
            }
        }
        let failed = |folder: &Path, error: &io::Error| HalError::File {
            path: folder.to_owned(),
            call: "build a kernel",
            message: error.to_string(),
        };
        let folder = temporary_folder().map_err(|error| failed(&std::env::temp_dir(), &error))?;
        match self.cached(folder.path(), spec) {
            Ok(path) => Ok(Object { path, _temporary: Some(folder) }),
            Err(Failure::Kernel(error)) => Err(error),
            Err(Failure::Folder(error)) => Err(failed(folder.path(), &error)),
        }
    }

    /// The shared object of `spec` in `folder`.
    fn cached(&self, folder: &Path, spec: &KernelSpec) -> Result<PathBuf, Failure> {
        let objects = Objects::open(folder)?;
        let unit = sources::translation_unit(spec);
        let of_unit = objects.note_path(&[&self.identity, &unit]);
        if let Some(object) = objects.noted(&of_unit) {
            return Ok(object);
        }
        let _span = tracing::info_span!("compile", kernel = spec.name, target = "host").entered();
        if let Some(undefined) = source::undefined_name(&spec.prelude, spec.text) {
            return Err(Failure::Kernel(self.error(spec, undefined.to_string())));
        }
        let sources = folder.join(format!("sources-{}", self.identity));
        sources::make(&sources)?;
        // Kernels of different variants are often identical after
        // preprocessing and are compiled only once.
        let text = self.run(spec, &sources, &["-E", "-I.", "-x", "c++"], None, unit.as_bytes())?;
        let of_text = objects.note_path(&[&self.identity, &String::from_utf8_lossy(&text)]);
        let object = match objects.noted(&of_text) {
            Some(object) => object,
            None => {
                let parts = TempDir::with_prefix_in("parts-", folder)?;
                let out = parts.path().join("kernel.so");
                self.run(spec, &sources, &["-x", "c++-cpp-output"], Some(&out), &text)?;
                objects.add(&of_text, &fs::read(&out)?)?
            }
        };
        objects.note(&of_unit, &object)?;
        Ok(object)
    }

    fn error(&self, spec: &KernelSpec, log: String) -> HalError {
        HalError::Compile {
            kernel: spec.name.clone(),
            target: "the host (emulation)".into(),
            options: self.flags.join(" "),
            log,
        }
    }

    /// Runs the compiler on `text`.
    fn run(
        &self,
        spec: &KernelSpec,
        sources: &Path,
        extra: &[&str],
        out: Option<&Path>,
        text: &[u8],
    ) -> Result<Vec<u8>, HalError> {
        let mut command = Command::new(&self.program);
        command.args(&self.flags).args(extra).arg("-").current_dir(sources);
        if let Some(out) = out {
            command.arg("-o").arg(out);
        }
        let fail = |log: String| self.error(spec, log);
        let io = |e: io::Error| fail(format!("{}: {e}", self.program));
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(io)?;
        let stdin = child.stdin.take();
        let text = text.to_vec();
        // Write from another thread; otherwise both sides
        // may block on full pipes.
        let writer =
            std::thread::Builder::new().spawn(move || stdin.map_or(Ok(()), |mut stdin| stdin.write_all(&text)));
        // Without that thread the pipe is closed, and the compiler ends.
        let output = child.wait_with_output().map_err(io)?;
        let writer = writer.map_err(io)?;
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

/// Host instruction sets that speed up half precision and FMA.
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

#[cfg(test)]
mod tests {
    use qgemm_testkit::skipped;

    use super::*;
    use crate::kernel::LoadedKernel;

    const SPEC: KernelSpec = KernelSpec {
        name: String::new(),
        entry: "test.cu",
        text: "struct P { unsigned out; };\nextern \"C\" __global__ void test(const P) {}\n",
        symbol: "test",
        prelude: String::new(),
        arch_specific: false,
    };

    fn compiler(test: &str, cache: Option<&Path>) -> Option<Compiler> {
        match Compiler::find(cache.map(Path::to_path_buf)) {
            Ok(compiler) => Some(compiler),
            Err(why) => {
                skipped(test, &why);
                None
            }
        }
    }

    fn loads(compiler: &Compiler) -> PathBuf {
        let object = compiler.shared_object(&SPEC).unwrap();
        LoadedKernel::load(object.path()).unwrap();
        object.path().to_path_buf()
    }

    fn modified(path: &Path) -> std::time::SystemTime {
        fs::metadata(path).unwrap().modified().unwrap()
    }

    #[test]
    fn a_kept_object_is_used_again_and_a_damaged_one_built_anew() {
        let folder = tempfile::tempdir().unwrap();
        let Some(compiler) = compiler("a_kept_object_is_used_again", Some(folder.path())) else { return };
        let object = loads(&compiler);
        let built = modified(&object);
        assert_eq!((loads(&compiler), modified(&object)), (object.clone(), built), "it is not built again");
        let whole = fs::read(&object).unwrap();
        for damaged in [&b""[..], &whole[..whole.len() / 2], b"not an object"] {
            fs::write(&object, damaged).unwrap();
            assert_eq!(loads(&compiler), object);
            assert_eq!(fs::read(&object).unwrap().len(), whole.len());
        }
        // An object without its note is not trusted.
        let notes = folder.path().read_dir().unwrap().map(|entry| entry.unwrap().path());
        notes
            .filter(|path| path.extension().is_some_and(|e| e == "note"))
            .for_each(|note| fs::remove_file(note).unwrap());
        fs::write(&object, b"not an object").unwrap();
        assert_eq!(loads(&compiler), object);
    }

    #[test]
    fn damaged_sources_are_written_again() {
        let folder = tempfile::tempdir().unwrap();
        let Some(compiler) = compiler("damaged_sources_are_written_again", Some(folder.path())) else { return };
        loads(&compiler);
        let sources = folder.path().join(format!("sources-{}", compiler.identity));
        let forget = || {
            let entries = folder.path().read_dir().unwrap().map(|entry| entry.unwrap().path());
            entries.filter(|path| path.is_file()).for_each(|file| fs::remove_file(file).unwrap());
        };
        let damages: [&dyn Fn(); 4] = [
            &|| fs::remove_dir_all(sources.join("atoms")).unwrap(),
            &|| fs::write(sources.join("entry.cuh"), b"#error damaged").unwrap(),
            &|| {
                fs::remove_file(sources.join("entry.cuh")).unwrap();
                fs::create_dir(sources.join("entry.cuh")).unwrap();
            },
            &|| {
                fs::remove_dir_all(&sources).unwrap();
                fs::write(&sources, b"a file").unwrap();
            },
        ];
        for damage in damages {
            forget();
            damage();
            loads(&compiler);
        }
    }

    #[test]
    fn without_a_cache_objects_are_removed_once_they_are_loaded() {
        // A file in place of the folder fails for every
        // user, including root.
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, b"").unwrap();
        for cache in [None, Some(file.as_path())] {
            let Some(compiler) = compiler("without_a_cache_objects_are_removed", cache) else { return };
            let object = compiler.shared_object(&SPEC).unwrap();
            let kernel = LoadedKernel::load(object.path()).unwrap();
            let path = object.path().to_path_buf();
            assert!(path.is_file());
            drop(object);
            assert!(!path.exists() && !path.parent().unwrap().exists());
            drop(kernel);
        }
    }

    #[cfg(unix)]
    #[test]
    fn what_others_can_write_is_not_loaded() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let cache = folder.path().join("cache");
        let Some(compiler) = compiler("what_others_can_write_is_not_loaded", Some(&cache)) else { return };
        let object = loads(&compiler);
        let set_mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        assert_eq!(fs::metadata(&cache).unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(fs::metadata(&object).unwrap().permissions().mode() & 0o022, 0);
        // Correct contents, but in a file that others could
        // change before it is loaded.
        set_mode(&object, 0o666);
        assert_eq!(loads(&compiler), object);
        assert_eq!(fs::metadata(&object).unwrap().permissions().mode() & 0o022, 0, "built anew");
        set_mode(&cache, 0o777);
        assert_ne!(loads(&compiler), object, "built in a folder of its own");
    }

    #[test]
    fn what_does_not_compile_is_no_matter_of_the_folder() {
        let folder = tempfile::tempdir().unwrap();
        let Some(compiler) = compiler("what_does_not_compile_is_no_matter", Some(folder.path())) else { return };
        let error = compiler.shared_object(&KernelSpec { text: "#error wrong\n", ..SPEC }).unwrap_err();
        assert!(matches!(&error, HalError::Compile { log, .. } if log.contains("wrong")), "{error}");
        let error = compiler.shared_object(&KernelSpec { text: "#if QG_STEPS\n#endif\n", ..SPEC }).unwrap_err();
        assert!(matches!(&error, HalError::Compile { log, .. } if log.contains("`QG_STEPS`")), "{error}");
    }
}
