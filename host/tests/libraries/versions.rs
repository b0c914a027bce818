//! Tests of drivers and NCCL libraries that are too old, or too new for each other.

use std::path::{Path, PathBuf};

use devcomm_host::{
    CollectiveConfig, CommConfig, Communicator, Context, DEV_COMM_VERSION, DevCommRequirements,
    DriverError, Error, Library, NcclError, OLDEST_VERSION, World,
};

use crate::support::tests;

tests! {
    a_machine_without_a_gpu_is_named in ["STUB_GPUS" = "0"],
    a_driver_that_is_too_old_is_named in ["STUB_CUDA" = "12020"],
    an_nccl_of_a_later_cuda_than_the_drivers_makes_no_communicator in ["STUB_CUDA" = "12080"],
    an_nccl_that_is_loaded_is_used_and_not_mixed_with_another,
    an_nccl_with_global_symbols_is_used_though_another_is_loaded_too,
    an_older_library_says_what_it_is_too_old_for in ["STUB_NCCL" = "22902"],
}

fn a_machine_without_a_gpu_is_named() {
    assert!(matches!(World::from_env(), Err(Error::Driver(DriverError::NoGpu))));
}

fn a_driver_that_is_too_old_is_named() {
    let text = World::from_env().unwrap_err().to_string();
    assert!(text.contains("CUDA 12.2, needed is 12.8"), "{text}");
}

fn an_nccl_of_a_later_cuda_than_the_drivers_makes_no_communicator() {
    let world = World::threads(2).unwrap();
    // Calls that need no GPU succeed.
    world.library().unique_id().unwrap();
    let text = world.run(|rank| rank.communicator().map(drop)).unwrap_err().to_string();
    let library = "lib/libnccl.so.2 is not a usable NCCL library";
    for part in [library, "built for CUDA 13.4", "supports CUDA 12.8"] {
        assert!(text.contains(part), "{text}");
    }
}

/// Loads a library as another part of the program does.
fn load(path: &Path) {
    // SAFETY: a stub without initialisers.
    std::mem::forget(unsafe { libloading::Library::new(path) }.unwrap());
}

fn an_nccl_that_is_loaded_is_used_and_not_mixed_with_another() {
    let home = PathBuf::from(std::env::var_os("DEVCOMM_NCCL_HOME").unwrap());
    let (named, folder) = (home.join("lib/libnccl.so.2"), tempfile::tempdir().unwrap());
    let other = folder.path().canonicalize().unwrap().join("libnccl.so.2.28.9");
    std::fs::copy(&named, &other).unwrap();
    load(&other);
    let text = Library::open(None).unwrap_err().to_string();
    for part in [other.to_str().unwrap(), named.to_str().unwrap(), "two NCCL libraries"] {
        assert!(text.contains(part), "{text}");
    }
    // The error is the same if the caller names NCCL's folder.
    let text = Library::open(Some(&home)).unwrap_err().to_string();
    assert!(text.contains("two NCCL libraries"), "{text}");
    // SAFETY: this process has one thread.
    unsafe { std::env::remove_var("DEVCOMM_NCCL_HOME") };
    assert_eq!(Library::open(None).unwrap().path(), other);
    // A library that is loaded by its path may be another one.
    assert_eq!(Library::load(&named, OLDEST_VERSION).unwrap().path(), named);
}

/// PyTorch loads the NCCL of its own package by its path, whichever other one is loaded.
fn an_nccl_with_global_symbols_is_used_though_another_is_loaded_too() {
    use libloading::os::unix::{Library as Loaded, RTLD_GLOBAL, RTLD_NOW};
    let home = PathBuf::from(std::env::var_os("DEVCOMM_NCCL_HOME").unwrap());
    let (named, folder) = (home.join("lib/libnccl.so.2"), tempfile::tempdir().unwrap());
    let folder = folder.path().canonicalize().unwrap();
    let copy = |name: &str| {
        let copy = folder.join(name);
        std::fs::copy(&named, &copy).unwrap();
        copy
    };
    let (first, own) = (copy("libnccl.so.2.28.8"), copy("libnccl.so.2.28.9"));
    load(&first);
    // SAFETY: the library runs no code of its own when it is loaded.
    std::mem::forget(unsafe { Loaded::open(Some(&own), RTLD_NOW | RTLD_GLOBAL) }.unwrap());
    let text = Library::open(None).unwrap_err().to_string();
    for part in [own.to_str().unwrap(), named.to_str().unwrap(), "two NCCL libraries"] {
        assert!(text.contains(part), "{text}");
    }
    // SAFETY: this process has one thread.
    unsafe { std::env::remove_var("DEVCOMM_NCCL_HOME") };
    for _ in 0..2 {
        assert_eq!(Library::open(None).unwrap().path(), own);
    }
}

fn an_older_library_says_what_it_is_too_old_for() {
    let path = PathBuf::from(std::env::var_os("DEVCOMM_NCCL_HOME").unwrap());
    let path = path.join("lib/libnccl.so.2");
    match Library::load(&path, DEV_COMM_VERSION) {
        Err(Error::Nccl(NcclError::TooOld { needs: DEV_COMM_VERSION, .. })) => {}
        other => panic!("{other:?}"),
    }
    let library = Library::load(&path, OLDEST_VERSION).unwrap();
    let context = Context::new(0).unwrap();
    let id = library.unique_id().unwrap();
    let (config, newer) = (CommConfig::new(), CommConfig::new().rma_eager_init(true));
    let init = |config| Communicator::init_rank(&library, &context, &id, 0, 1, config);
    let unsupported = |error: Error| match error {
        Error::Nccl(NcclError::Unsupported { needs, has, .. }) => {
            assert!(has < needs && needs <= DEV_COMM_VERSION)
        }
        other => panic!("{other:?}"),
    };
    unsupported(init(&newer).unwrap_err());
    let comm = init(&config).unwrap();
    unsupported(comm.properties().unwrap_err());
    unsupported(comm.create_dev_comm(DevCommRequirements::new()).unwrap_err());
    unsupported(comm.configured(&CollectiveConfig::new()).unwrap_err());
    drop(comm.window::<f32>(8).unwrap());
    comm.destroy().unwrap();
}
