//! A test of `PeerTiles`.

use cuda_std::bf16;
use devcomm::device::{EMPTY, Lamport, PeerTiles, lamport_words};
use devcomm::{DevCommRequirements, LaunchConfig, Rank, Simulation};
use devcomm_device_tests::KERNELS;
use devcomm_device_tests::kernels::{
    self,
    peer_tiles::{SHARED, THREADS},
};
use devcomm_testing::machines::Gpus;

/// Parts that are cut off in both directions, and two tiles in a row.
const M: usize = 37;
const N: usize = 264;

/// Three sums in a row: the banks of slots take turns.
macro_rules! test_of {
    ($name:ident, $ranks:literal) => {
        #[test]
        fn $name() {
            let gpus = Gpus::from(Simulation::new($ranks)).with_kernels(&KERNELS);
            gpus.run_seeds(stringify!($name), 0..5, |rank: &Rank, _| {
                rank.load(&KERNELS)?;
                let (comm, stream) = (rank.communicator()?, rank.stream()?);
                let capacity = PeerTiles::<$ranks>::slots(M, N).unwrap();
                let slots = comm.window::<u32>(lamport_words($ranks, capacity as usize))?;
                let state = comm.mem_alloc::<u32>(Lamport::<$ranks>::STATE)?;
                let c = comm.mem_alloc::<bf16>(M * N)?;
                stream.fill(&slots, EMPTY)?;
                stream.fill(&state, 0)?;
                stream.synchronize()?;
                let dev = comm.create_dev_comm(DevCommRequirements::new())?;
                rank.barrier()?;
                for launch in 0..3 {
                    c.fill_bytes(0xff)?;
                    let sum = kernels::peer_tiles_sum::<$ranks>::args(
                        &dev, &c, &slots, &state, capacity, M as u32, N as u32,
                    );
                    let config = LaunchConfig::new(1, THREADS).with_dynamic_shared(SHARED);
                    // SAFETY: C and the slots have the elements; all ranks launch the same.
                    unsafe { sum.config(config).launch(&stream)? };
                    stream.synchronize()?;
                    let mut got = vec![bf16::NAN; M * N];
                    c.copy_to_host(&mut got)?;
                    for (i, got) in got.into_iter().enumerate() {
                        let own = |rank: u32| (rank + (i / N + 2 * (i % N)) as u32) as f32;
                        let rounded = |rank| bf16::from_f32(own(rank)).to_f32();
                        let right = bf16::from_f32((0..$ranks).map(rounded).sum());
                        assert_eq!(got, right, "{rank:?}, launch {launch}, element {i}");
                    }
                }
                rank.barrier()
            });
        }
    };
}

test_of!(parts_of_two_ranks_are_added, 2);
test_of!(parts_of_four_ranks_are_added, 4);
test_of!(parts_of_eight_ranks_are_added, 8);
