//! The fakes, the processes that find them, and what tests share.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use devcomm_host::{
    Buffer, DevCommResource, Element, Error, KernelSet, Kernels, LaunchConfig, Rank, Result,
    Stream, Window, World,
};
use devcomm_types::{DevComm as RawDevComm, Kernel, KernelParam, Window as RawWindow};

/// A promise, kept by a job that a child process does: once for each environment, or once with
/// none.
#[derive(Clone, Copy)]
pub(crate) struct Test {
    pub name: &'static str,
    pub job: fn(),
    pub environments: &'static [Environment],
}

pub(crate) type Environment = &'static [(&'static str, &'static str)];

/// The tests of a module, each with the environments it runs in.
macro_rules! tests {
    ($( $test:ident $( in $([$($key:literal = $value:literal),+])+ )? ),* $(,)?) => {
        pub(crate) const TESTS: &[crate::support::Test] = &[$(
            crate::support::Test {
                name: stringify!($test),
                job: $test,
                environments: &[$( $( &[$(($key, $value)),+] ),+ )?],
            }
        ),*];
    };
}
pub(crate) use tests;

/// Where the compiled fakes are; `None` without a C compiler.
fn fakes() -> Option<&'static Path> {
    static FAKES: OnceLock<Option<PathBuf>> = OnceLock::new();
    let compiled = FAKES.get_or_init(|| {
        // In the build's own folder: the fakes are made anew by every run.
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(std::process::id().to_string());
        let cuda = folder.join("libcuda.so");
        let nccl = folder.join("lib/libnccl.so.2");
        (compile("cuda.c", &cuda, &[]) && compile("nccl.c", &nccl, &[&cuda])).then_some(folder)
    });
    compiled.as_deref()
}

/// Removes what [`fakes`] made.
pub(crate) fn remove_fakes() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(std::process::id().to_string());
    let _ = std::fs::remove_dir_all(folder);
}

fn compile(source: &str, library: &Path, with: &[&Path]) -> bool {
    std::fs::create_dir_all(library.parent().unwrap()).unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_gpu").join(source);
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-pthread", "-o"]).arg(library).arg(source).args(with);
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

/// Does a job in a process that finds the fakes, with four GPUs unless `env` says otherwise.
/// Returns its output and its log; `None` without a C compiler.
pub(crate) fn run(name: &str, env: &[(&str, &str)]) -> Option<(Output, String)> {
    let fakes = fakes()?;
    let log = tempfile::NamedTempFile::new().unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap());
    for launcher in ["RANK", "WORLD_SIZE", "NCCL_NVLS_ENABLE", "RUST_BACKTRACE"] {
        child.env_remove(launcher);
    }
    child.env("FAKE_JOB", name).env("FAKE_LOG", log.path()).env("FAKE_GPUS", "4");
    child.env("LD_LIBRARY_PATH", fakes).env("DEVCOMM_NCCL_HOME", fakes);
    let output = child.envs(env.iter().copied()).output().unwrap();
    let log = std::fs::read_to_string(log.path()).unwrap();
    if !output.status.success() {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        panic!(
            "{name} with {env:?}: {}\n{}{}{log}",
            output.status,
            text(&output.stdout),
            text(&output.stderr)
        );
    }
    Some((output, log))
}

/// Ends a job that hangs, by SIGALRM: a thread for it would be one that settings for a whole
/// process must come before.
pub(crate) fn end_after_20_seconds() {
    // SAFETY: it takes a number, and nobody here handles the signal.
    unsafe { libc::alarm(20) };
}

/// A job of `n` ranks, which all come to the same.
pub(crate) fn ranks<T: Send>(n: usize, f: impl Fn(&Rank) -> Result<T> + Sync) -> Vec<T> {
    World::threads(n).unwrap().run(f).unwrap()
}

/// What one GPU's rank has done so far, as the fakes log it.
pub(crate) fn log_of(gpu: usize) -> Vec<String> {
    let log = std::fs::read_to_string(std::env::var("FAKE_LOG").unwrap()).unwrap();
    lines_of(&log, gpu)
}

pub(crate) fn lines_of(log: &str, gpu: usize) -> Vec<String> {
    let head = format!("gpu{gpu} ");
    log.lines().filter_map(|line| line.strip_prefix(&head)).map(str::to_owned).collect()
}

/// Runs `f` and returns what this rank's GPU has logged meanwhile.
pub(crate) fn logged<T>(gpu: usize, f: impl FnOnce() -> T) -> (T, Vec<String>) {
    let before = log_of(gpu).len();
    let result = f();
    (result, log_of(gpu).split_off(before))
}

/// Fails if the fakes saw a call on something that had ended, or ranks that called different
/// things.
pub(crate) fn assert_clean() {
    let log = std::fs::read_to_string(std::env::var("FAKE_LOG").unwrap()).unwrap();
    assert!(!log.contains("AFTER ITS END") && !log.contains("MISMATCH"), "{log}");
}

/// What is in a buffer.
pub(crate) fn contents<T: Element + Default>(buffer: &impl Buffer<Element = T>) -> Vec<T> {
    let slice = buffer.device_slice();
    let mut data = vec![T::default(); slice.len()];
    slice.copy_to_host(&mut data).unwrap();
    data
}

pub(crate) fn is_invalid<T: std::fmt::Debug>(result: Result<T>) {
    assert!(matches!(result, Err(Error::InvalidInput { .. })), "{result:?}");
}

pub(crate) fn is_closed<T: std::fmt::Debug>(result: Result<T>) {
    assert!(matches!(result, Err(Error::Closed { .. })), "{result:?}");
}

pub(crate) fn is_in_group<T: std::fmt::Debug>(result: Result<T>) {
    assert!(matches!(result, Err(Error::InGroup { .. })), "{result:?}");
}

pub(crate) fn is_capturing<T: std::fmt::Debug>(result: Result<T>) {
    assert!(matches!(result, Err(Error::Capturing { .. })), "{result:?}");
}

#[track_caller]
pub(crate) fn is_ended<T: std::fmt::Debug>(result: Result<T>, as_what: &str) {
    match result {
        Err(Error::CommunicatorEnded { how, .. }) if how == as_what => {}
        other => panic!("{other:?}, not {as_what}"),
    }
}

#[derive(Clone, Copy)]
pub(crate) struct DevComm(#[expect(dead_code, reason = "only its layout matters")] RawDevComm);
// SAFETY: a wrapper of its Abi with the same layout.
unsafe impl KernelParam for DevComm {
    type Abi = RawDevComm;
    const IS_DEV_COMM: bool = true;
}

#[derive(Clone, Copy)]
pub(crate) struct WindowParam(
    #[expect(dead_code, reason = "only its layout matters")] RawWindow<f32>,
);
// SAFETY: as above.
unsafe impl KernelParam for WindowParam {
    type Abi = RawWindow<f32>;
}

macro_rules! kernels {
    ($($item:ident = $file:literal $name:literal $(gin $gin:literal)?),*) => { $(
        #[derive(Clone, Copy)]
        pub(crate) struct $item;
        impl Kernel for $item {
            const NAME: &'static str = $name;
            const FILE: &'static str = $file;
            $( const GIN: bool = $gin; )?
            type Args = (DevComm, WindowParam, usize);
        }
    )* };
}
kernels!(Fill = "fill" "fill", Unknown = "fill" "unknown", Ping = "ping" "ping" gin true);

pub(crate) const SIDECAR: &str = r#"{"arch":"sm_90","ptx_isa":"8.6","nccl":{"version":"2.32.3"},"kernels":[{"name":"fill","lsa_barriers":true,"params":[
    {"name":"comm","type":"DevComm","size":248},{"name":"window","type":"Window<f32>","size":8},
    {"name":"count","type":"usize","size":8}]}]}"#;
/// A kernel for GIN of an older build, which knew two back ends.
const GIN_SIDECAR: &str = r#"{"arch":"sm_90","ptx_isa":"8.6","nccl":{"version":"2.32.3"},"kernels":[
    {"name":"ping_proxy","params":[{"name":"comm","type":"DevComm","size":248},
    {"name":"window","type":"Window<f32>","size":8},{"name":"count","type":"usize","size":8}]},
    {"name":"ping_gdaki","params":[{"name":"comm","type":"DevComm","size":248},
    {"name":"window","type":"Window<f32>","size":8},{"name":"count","type":"usize","size":8}]}]}"#;
pub(crate) const KERNELS: KernelSet = KernelSet::new((&[("fill", ".version 8.6", SIDECAR)], None));
pub(crate) const GIN_KERNELS: KernelSet =
    KernelSet::new((&[("ping", ".version 8.6", GIN_SIDECAR)], None));
pub(crate) const NEWER: KernelSet = KernelSet::new((&[("fill", ".version 99", SIDECAR)], None));
pub(crate) const BROKEN: KernelSet = KernelSet::new((&[("fill", "broken", SIDECAR)], None));

/// Elements of the buffers in most tests.
pub(crate) const COUNT: usize = 1000;

/// Launches `Fill`, which the fake driver does not run.
pub(crate) fn fill(
    kernels: &Kernels,
    stream: &Stream,
    config: LaunchConfig,
    (dev, window): (&DevCommResource, &Window<f32>),
) -> Result<()> {
    // SAFETY: the fake driver runs no kernel.
    unsafe { kernels.launch(stream, Fill, config, (dev, window, COUNT)) }
}

/// Launches `Ping`, as above.
pub(crate) fn ping(
    kernels: &Kernels,
    stream: &Stream,
    (dev, window): (&DevCommResource, &Window<f32>),
) -> Result<()> {
    // SAFETY: as above.
    unsafe { kernels.launch(stream, Ping, LaunchConfig::new(2, 32), (dev, window, COUNT)) }
}
