//! Helpers of the tests: compile the stub libraries, and run tests in child processes that find
//! them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use devcomm_host::{KernelSet, ModuleSource};
use devcomm_types::{ArgInfo, DevComm, IntoArg, Kernel, KernelParam, Unsafe};
use miniz_oxide::deflate::compress_to_vec_zlib;

/// A test, whose body runs in a child process: once per environment, or once without variables.
#[derive(Clone, Copy)]
pub(crate) struct Test {
    pub name: &'static str,
    pub body: fn(),
    pub environments: &'static [Environment],
}

pub(crate) type Environment = &'static [(&'static str, &'static str)];

/// The tests of a module, each with the environments it runs in.
macro_rules! tests {
    ($( $test:ident $( in $([$($key:literal = $value:literal),+])+ )? ),* $(,)?) => {
        pub(crate) const TESTS: &[crate::support::Test] = &[$(
            crate::support::Test {
                name: stringify!($test),
                body: $test,
                environments: &[$( $( &[$(($key, $value)),+] ),+ )?],
            }
        ),*];
    };
}
pub(crate) use tests;

/// Returns the folder of the compiled libraries; `None` without a C compiler.
fn libraries() -> Option<&'static Path> {
    static LIBRARIES: OnceLock<Option<PathBuf>> = OnceLock::new();
    let compiled = LIBRARIES.get_or_init(|| {
        let (cuda, nccl) = (folder().join("libcuda.so"), folder().join("lib/libnccl.so.2"));
        (compile("cuda.c", &cuda, &[]) && compile("nccl.c", &nccl, &[&cuda])).then(folder)
    });
    compiled.as_deref()
}

/// Returns a folder in cargo's target folder, used by this run only.
fn folder() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(std::process::id().to_string())
}

/// Removes the compiled libraries.
pub(crate) fn remove_libraries() {
    let _ = std::fs::remove_dir_all(folder());
}

fn compile(source: &str, library: &Path, with: &[&Path]) -> bool {
    std::fs::create_dir_all(library.parent().unwrap()).unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/libraries").join(source);
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).arg(library).arg(source).args(with);
    match compiler.status() {
        Ok(status) => {
            assert!(status.success(), "cc: {status}");
            true
        }
        Err(error) => {
            eprintln!("SKIPPED: no C compiler: {error}");
            false
        }
    }
}

/// Runs the body of a test in a child process that finds the libraries. Returns the stub driver's
/// log; `None` without a C compiler.
pub(crate) fn run(name: &str, env: &[(&str, &str)]) -> Option<String> {
    let libraries = libraries()?;
    let log = tempfile::NamedTempFile::new().unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap());
    let inherited =
        ["RANK", "WORLD_SIZE", "DEVCOMM_SIMULATE", "DEVCOMM_TEST_GPUS", "RUST_BACKTRACE"];
    for variable in inherited {
        child.env_remove(variable);
    }
    child.env("STUB_TEST", name).env("STUB_LOG", log.path());
    child.env("LD_LIBRARY_PATH", libraries).env("DEVCOMM_NCCL_HOME", libraries);
    let output = child.envs(env.iter().copied()).output().unwrap();
    let log = std::fs::read_to_string(log.path()).unwrap();
    if !output.status.success() {
        let [stdout, stderr] = [&output.stdout, &output.stderr].map(|b| String::from_utf8_lossy(b));
        panic!("{name} with {env:?}: {}\n{stdout}{stderr}{log}", output.status);
    }
    Some(log)
}

/// Returns the lines that the stub driver has logged so far for one GPU.
pub(crate) fn log_of(gpu: usize) -> Vec<String> {
    lines_of(&std::fs::read_to_string(std::env::var("STUB_LOG").unwrap()).unwrap(), gpu)
}

pub(crate) fn lines_of(log: &str, gpu: usize) -> Vec<String> {
    let head = format!("gpu{gpu} ");
    log.lines().filter_map(|line| line.strip_prefix(&head)).map(str::to_owned).collect()
}

/// Ends a test that hangs, by SIGALRM. A watchdog thread is not possible: `GinLoopback` sets
/// variables only in a process with one thread.
pub(crate) fn end_after_20_seconds() {
    // SAFETY: `alarm` has no requirements.
    unsafe { libc::alarm(20) };
}

/// A kernel parameter of type [`DevComm`].
#[derive(Clone, Copy)]
pub(crate) struct DevCommParam(#[expect(dead_code, reason = "only its layout matters")] DevComm);
// SAFETY: a wrapper of its `Abi`, with the same layout.
unsafe impl KernelParam for DevCommParam {
    type Abi = DevComm;
    const IS_DEV_COMM: bool = true;
}

/// A fake device communicator: the stub driver's kernels do not read it.
pub(crate) struct FakeDevComm(pub DevComm);

impl FakeDevComm {
    /// Returns a device communicator with this number of LSA barriers, and GIN connections of these
    /// `ncclGinType_t`s.
    pub(crate) fn new(lsa_barriers: i32, connections: &[u8]) -> Self {
        let mut made = DevComm { magic: 0xcafe_beef, version: 23203, ..DevComm::zeroed() };
        made.lsa_barrier.n_barriers = lsa_barriers;
        made.gin_connection_count = connections.len() as u8;
        made.gin_net_device_types[..connections.len()].copy_from_slice(connections);
        Self(made)
    }
}

// SAFETY: the stub driver's kernels do not read it.
unsafe impl IntoArg<DevComm> for &FakeDevComm {
    fn into_arg(self) -> DevComm {
        self.0
    }

    fn info(&self) -> ArgInfo<'_> {
        ArgInfo { dev_comm: Some(&self.0), ..ArgInfo::default() }
    }
}

/// Defines a kernel for each type: its file, its name, and whether it uses GIN.
macro_rules! kernels {
    ($($item:ident = $file:literal $name:literal $(gin $gin:literal)?),*) => { $(
        pub(crate) enum $item {}
        // SAFETY: the stub driver runs no kernel.
        unsafe impl Kernel for $item {
            const NAME: &'static str = $name;
            const PACKAGE: &'static str = "tests";
            const FILE: &'static str = $file;
            $( const GIN: bool = $gin; )?
            type Args = (DevCommParam, usize);
            type Safety = Unsafe;
        }
    )* };
}
kernels!(Fill = "fill" "fill", Unknown = "fill" "unknown", Ping = "ping" "ping" gin true);

/// Returns a set of one module, as a program includes it.
pub(crate) fn set(file: &'static str, ptx: &str, sidecar: &str, cubin: Option<&[u8]>) -> KernelSet {
    set_of((file, packed(ptx), sidecar.to_owned().leak(), cubin.map(packed)))
}

pub(crate) fn set_of(module: ModuleSource) -> KernelSet {
    // SAFETY: the stub driver runs no kernel.
    unsafe { KernelSet::new((Box::leak(Box::new([module])), None)) }
}

/// Returns bytes as a program includes them, compressed by zlib.
pub(crate) fn packed(bytes: impl AsRef<[u8]>) -> &'static [u8] {
    compress_to_vec_zlib(bytes.as_ref(), 1).leak()
}

pub(crate) const SIDECAR: &str = r#"{"arch":"sm_90","ptx_isa":"8.6","nccl":{"version":"2.32.3"},
    "kernels":[{"name":"fill","lsa_barriers":true,"params":[
        {"name":"comm","type":"DevComm","size":248},{"name":"count","type":"usize","size":8}]}]}"#;
