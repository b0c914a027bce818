//! Tests of the launches that are refused, and that launches work afterwards.

use devcomm::{
    DevCommRequirements, DevCommResource, Error, KERNELS, LaunchConfig, LaunchError, LaunchRefusal,
    Stream, Window, kernels,
};
use devcomm_testing::machines::Gpus;

const COUNT: usize = 1024;

/// A rank's stream, device communicator and windows.
struct Job {
    stream: Stream,
    dev_comm: DevCommResource,
    send: Window<f32>,
    recv: Window<f32>,
}

impl Job {
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
fn with_job(name: &str, barriers: u32, body: impl Fn(&Job) + Sync) {
    with_job_on(Gpus::new(2), name, barriers, body);
}

fn with_job_on(gpus: Gpus, name: &str, barriers: u32, body: impl Fn(&Job) + Sync) {
    gpus.run(name, |rank| {
        let comm = rank.communicator()?;
        let requirements = DevCommRequirements::new().lsa_barriers(barriers);
        rank.load(&KERNELS)?;
        let job = Job {
            stream: rank.stream()?,
            dev_comm: comm.create_dev_comm(requirements)?,
            send: comm.window(COUNT)?,
            recv: comm.window(COUNT)?,
        };
        body(&job);
        job.send.copy_from_host(&[1.5; COUNT])?;
        rank.barrier()?;
        job.launch(LaunchConfig::new(2, 128))?;
        job.stream.synchronize()?;
        rank.barrier()?;
        let mut result = vec![0.0; COUNT];
        job.recv.copy_to_host(&mut result)?;
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
    // Simulated: no metadata tells before the launch which barriers a kernel uses.
    let gpus = Gpus::new(2).only_real("machine code that says which barriers it uses");
    with_job_on(gpus, "refuses_more_blocks_than_barriers", 4, |job| {
        let refused = refusal(job.launch(LaunchConfig::new(5, 128)));
        assert!(matches!(refused, LaunchRefusal::TooFewBarriers { blocks: 5, barriers: 4 }));
    });
}

#[test]
fn refuses_a_grid_that_is_not_resident() {
    with_job("refuses_a_grid_that_is_not_resident", 4096, |job| {
        let resident = job.resident_blocks(512);
        let refused = refusal(job.launch(LaunchConfig::new(resident + 1, 512)));
        assert!(matches!(refused, LaunchRefusal::NotResident { .. }), "{refused}");
    });
}

#[test]
fn the_largest_resident_grid_runs() {
    with_job("the_largest_resident_grid_runs", 4096, |job| {
        let resident = job.resident_blocks(512);
        job.launch(LaunchConfig::new(resident, 512)).unwrap();
        job.stream.synchronize().unwrap();
    });
}

#[test]
fn refuses_a_block_of_two_dimensions() {
    with_job("refuses_a_block_of_two_dimensions", 4, |job| {
        let refused = refusal(job.launch(LaunchConfig::new(1, (32, 4))));
        assert!(matches!(refused, LaunchRefusal::BlockNotOneDimensional { .. }), "{refused}");
    });
}

#[test]
fn refuses_more_threads_than_registers_allow() {
    let gpus = Gpus::new(2).only_real("registers");
    with_job_on(gpus, "refuses_more_threads_than_registers_allow", 4, |job| {
        let refused = refusal(job.launch(LaunchConfig::new(1, 1024)));
        assert!(matches!(refused, LaunchRefusal::TooManyRegisters { .. }), "{refused}");
    });
}

#[test]
fn refuses_an_empty_grid() {
    with_job("refuses_an_empty_grid", 4, |job| {
        let refused = refusal(job.launch(LaunchConfig::new(0, 128)));
        assert!(matches!(refused, LaunchRefusal::Empty { .. }), "{refused}");
    });
}
