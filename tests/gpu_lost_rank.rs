//! A rank that goes, while the kernels of the others wait for it, is an error that names it, within a deadline.

use std::time::{Duration, Instant};

use devcomm::{
    DevCommRequirements, Error, KERNELS, LaunchConfig, LocalJob, World, kernels, visible_gpus,
};

/// How long the survivors may take to notice.
const DEADLINE: Duration = Duration::from_secs(15);
const TIMES: usize = 3;

/// Starts this test program again as two ranks, of which rank 1 goes.
#[test]
fn a_killed_rank_ends_the_job() {
    if World::is_launched() {
        return be_a_rank();
    }
    let name = "a_killed_rank_ends_the_job";
    match visible_gpus() {
        Ok(2..) => {}
        Ok(n) => return println!("GPU-TEST {name}: skipped ({n} GPUs are visible, 2 are needed)"),
        Err(reason) => return println!("GPU-TEST {name}: skipped ({reason})"),
    }
    for _ in 0..TIMES {
        let started = Instant::now();
        let job = LocalJob::new(2).unwrap().args([name, "--exact", "--nocapture"]);
        let error = job.run().unwrap_err().to_string();
        assert!(error.contains("rank 1"), "{error}");
        assert!(started.elapsed() < DEADLINE + Duration::from_secs(20), "{:?}", started.elapsed());
    }
    println!("GPU-TEST {name}: ran");
}

fn be_a_rank() {
    let error = World::from_env()
        .and_then(|world| {
            world.run(|rank| {
                let comm = rank.communicator()?;
                let (send, recv) = (comm.window::<f32>(1024)?, comm.window::<f32>(1024)?);
                let requirements = DevCommRequirements::new().lsa_barriers(1);
                let dev_comm = comm.create_dev_comm(requirements)?;
                let (kernels, stream) = (rank.load(&KERNELS)?, rank.stream()?);
                if rank.rank() == 1 {
                    // As if killed: no destructor, no goodbye.
                    std::process::abort();
                }
                let args = (&dev_comm, &send, &recv, 1024);
                let kernel = kernels::lsa_allreduce::<f32>;
                // SAFETY: both windows have 1024 elements in every rank. Rank 1 never comes, so this kernel never ends.
                unsafe { kernels.launch(&stream, kernel, LaunchConfig::new(1, 128), args)? };
                let started = Instant::now();
                let result = stream.synchronize();
                assert!(started.elapsed() < DEADLINE, "noticed after {:?}", started.elapsed());
                result
            })
        })
        .unwrap_err();
    assert!(matches!(error, Error::RankLost { rank: 1, .. }), "{error}");
    println!("rank 0: {error}");
    // The kernel still runs; it ends with the process.
    std::process::exit(1);
}
