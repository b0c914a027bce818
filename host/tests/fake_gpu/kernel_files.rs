//! Kernels that are loaded from files.

use std::fs;

use devcomm_host::{DevCommRequirements, Error, Kernels, LaunchConfig, Rank, Result};

use crate::support::{COUNT, Fill, SIDECAR, fill, log_of, ranks, tests};

tests! {
    kernels_of_a_file_are_launched_under_the_type_of_its_name,
    a_file_that_cannot_be_loaded_says_why,
}

fn kernels_of_a_file_are_launched_under_the_type_of_its_name() {
    ranks(1, |rank: &Rank| -> Result<()> {
        let folder = tempfile::tempdir().unwrap();
        let cubin = folder.path().join("fill.cubin");
        fs::write(folder.path().join("fill.json"), SIDECAR).unwrap();
        let kernels = Kernels::load_files(rank.context(), &[&cubin])?;
        assert_eq!(kernels.info(Fill)?.registers, 32);
        let comm = rank.communicator()?;
        let window = comm.window::<f32>(COUNT)?;
        let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(2))?;
        let stream = rank.stream()?;
        fill(&kernels, &stream, LaunchConfig::new(2, 64), (&dev, &window))?;
        stream.synchronize()
    });
    assert!(log_of(0).iter().any(|line| line == "cuModuleLoad fill.cubin"), "{:?}", log_of(0));
}

fn a_file_that_cannot_be_loaded_says_why() {
    ranks(1, |rank: &Rank| -> Result<()> {
        let folder = tempfile::tempdir().unwrap();
        let load = |name: &str| {
            Kernels::load_files(rank.context(), &[folder.path().join(name)]).unwrap_err()
        };
        let error = load("fill.cubin");
        assert!(matches!(error, Error::BadSidecar { .. }), "{error}");
        assert!(error.to_string().contains("fill.json"), "{error}");
        fs::write(folder.path().join("broken.json"), SIDECAR).unwrap();
        let error = load("broken.cubin").to_string();
        assert!(error.contains("cuModuleLoad") && error.contains("broken.cubin"), "{error}");
        fs::write(folder.path().join("old.json"), SIDECAR.replace("2.32.3", "2.30.7")).unwrap();
        assert!(matches!(load("old.cubin"), Error::WrongNcclStamp { .. }));
        Ok(())
    });
}
