//! The example `with_cudarc`, on GPUs, in a process of its own.

use std::os::unix::fs::symlink;
use std::process::Command;

use devcomm::Library;
use devcomm_testing::machines::Gpus;

#[path = "../with_cudarc.rs"]
#[allow(dead_code, reason = "its `main`")]
mod with_cudarc;

/// Set in the process that runs the example.
const INNER: &str = "DEVCOMM_TEST_CUDARC";
/// The folders in which the dynamic linker looks for libraries.
const PATHS: &str = "LD_LIBRARY_PATH";

#[test]
fn cudarcs_communicator_memory_and_stream_with_devcomms_collectives() {
    let name = "cudarcs_communicator_memory_and_stream_with_devcomms_collectives";
    let library = if Gpus::are_real() { Library::open(None).ok() } else { None };
    let (Some(library), None) = (library, std::env::var_os(INNER)) else {
        let gpus = Gpus::new(2).only_real("CUDA driver that cudarc loads");
        return gpus.with_world(name, |world| {
            world.run(with_cudarc::run_rank).unwrap();
        });
    };
    // cudarc opens `libnccl.so`; the dynamic linker reads its folders when a process starts.
    let folder = tempfile::tempdir().unwrap();
    symlink(library.path(), folder.path().join("libnccl.so")).unwrap();
    let mut inner = Command::new(std::env::current_exe().unwrap());
    inner.args(["--exact", name, "--nocapture"]).env(INNER, "1");
    let mut folders = vec![folder.path().to_owned()];
    folders.extend(std::env::split_paths(&std::env::var_os(PATHS).unwrap_or_default()));
    inner.env(PATHS, std::env::join_paths(folders).unwrap());
    assert!(inner.status().unwrap().success());
}
