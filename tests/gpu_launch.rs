//! Tests of the launches that are refused, and that launches work afterwards.

use devcomm::{
    DevCommRequirements, DevCommResource, Error, KERNELS, LaunchConfig, LaunchError, LaunchRefusal,
    Stream, Window, kernels,
};
use devcomm_testing::machines::Gpus;

const COUNT: usize = 1024;

/// A rank's stream, device communicator and windows.
struct Setup {
    stream: Stream,
    dev_comm: DevCommResource,
    send: Window<f32>,
    recv: Window<f32>,
}

impl Setup {
    fn resident_blocks(&self, block: u32) -> u32 {
        let context = self.stream.context();
        context.resident_blocks::<kernels::lsa_allreduce<f32>>(block, 0).unwrap()
    }

    fn launch(&self, config: LaunchConfig) -> Result<(), Error> {
        let sum = kernels::lsa_allreduce::args(&self.dev_comm, &self.send, &self.recv, COUNT);
        sum.config(config).launch(&self.stream)
    }
}

/// Runs `body` on two GPUs with `barriers` LSA barriers, and then checks a launch.
fn with_setup(name: &str, barriers: u32, body: impl Fn(&Setup) + Sync) {
    with_setup_on(Gpus::new(2), name, barriers, body);
}

fn with_setup_on(gpus: Gpus, name: &str, barriers: u32, body: impl Fn(&Setup) + Sync) {
    gpus.run(name, |rank| {
        let comm = rank.communicator()?;
        let requirements = DevCommRequirements::new().lsa_barriers(barriers);
        rank.load(&KERNELS)?;
        let setup = Setup {
            stream: rank.stream()?,
            dev_comm: comm.create_dev_comm(requirements)?,
            send: comm.window(COUNT)?,
            recv: comm.window(COUNT)?,
        };
        body(&setup);
        setup.send.copy_from_host(&[1.5; COUNT])?;
        rank.barrier()?;
        setup.launch(LaunchConfig::new(2, 128))?;
        setup.stream.synchronize()?;
        rank.barrier()?;
        let mut result = vec![0.0; COUNT];
        setup.recv.copy_to_host(&mut result)?;
        assert!(result.iter().all(|&x| x == 3.0));
        Ok(())
    });
}

fn refusal(result: Result<(), Error>) -> LaunchRefusal {
    match result {
        Err(Error::Launch(LaunchError::Refused { refusal, .. })) => refusal,
        other => panic!("expected a refusal, got {other:?}"),
    }
}

#[test]
fn refuses_more_blocks_than_barriers() {
    with_setup("refuses_more_blocks_than_barriers", 4, |setup| {
        let refused = refusal(setup.launch(LaunchConfig::new(5, 128)));
        assert!(matches!(refused, LaunchRefusal::TooFewBarriers { blocks: 5, barriers: 4 }));
    });
}

#[test]
fn refuses_a_grid_that_is_not_resident() {
    with_setup("refuses_a_grid_that_is_not_resident", 4096, |setup| {
        let resident = setup.resident_blocks(512);
        let refused = refusal(setup.launch(LaunchConfig::new(resident + 1, 512)));
        assert!(matches!(refused, LaunchRefusal::NotResident { .. }), "{refused}");
    });
}

#[test]
fn the_largest_resident_grid_runs() {
    with_setup("the_largest_resident_grid_runs", 4096, |setup| {
        let resident = setup.resident_blocks(512);
        setup.launch(LaunchConfig::new(resident, 512)).unwrap();
        setup.stream.synchronize().unwrap();
    });
}

#[test]
fn refuses_a_grid_or_a_block_of_two_dimensions() {
    with_setup("refuses_a_grid_or_a_block_of_two_dimensions", 4, |setup| {
        for config in [LaunchConfig::new(1, (32, 4)), LaunchConfig::new((2, 2), 32)] {
            let refused = refusal(setup.launch(config));
            assert!(matches!(refused, LaunchRefusal::NotOneDimensional { .. }), "{refused}");
        }
    });
}

#[test]
fn refuses_more_threads_than_registers_allow() {
    let gpus = Gpus::new(2).only_real("registers");
    with_setup_on(gpus, "refuses_more_threads_than_registers_allow", 4, |setup| {
        let refused = refusal(setup.launch(LaunchConfig::new(1, 1024)));
        assert!(matches!(refused, LaunchRefusal::TooManyRegisters { .. }), "{refused}");
    });
}

#[test]
fn refuses_an_empty_grid() {
    with_setup("refuses_an_empty_grid", 4, |setup| {
        let refused = refusal(setup.launch(LaunchConfig::new(0, 128)));
        assert!(matches!(refused, LaunchRefusal::Empty { .. }), "{refused}");
    });
}
