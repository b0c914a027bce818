//! A test of `PeerRegTiles`.

use std::time::Duration;

use cuda_std::bf16;
use devcomm::device::PeerRegTiles;
use devcomm::{
    DevCommRequirements, Error, LamportMemory, LaunchConfig, LaunchError, Rank, Simulation,
};
use devcomm_device_tests::KERNELS;
use devcomm_device_tests::kernels::{
    self,
    peer_reg_tiles::{TILE, WARPS},
};
use devcomm_testing::machines::Gpus;

/// Tiles: one warp has two, and the other one.
const TILES: u32 = 3;

/// Tests three successive sums, as the banks of slots take turns, of all columns and of some.
macro_rules! test_of {
    ($name:ident, $ranks:literal) => {
        #[test]
        fn $name() {
            let gpus = Gpus::from(Simulation::new($ranks)).with_kernels(&KERNELS);
            gpus.run_seeds(stringify!($name), 0..5, |rank: &Rank, _| {
                rank.load(&KERNELS)?;
                let (comm, stream) = (rank.communicator()?, rank.stream()?);
                let [rows, columns] = [TILES * TILE[0], TILE[1]].map(|extent| extent as usize);
                let capacity = PeerRegTiles::<$ranks>::slots(TILES as usize, columns).unwrap();
                let memory = LamportMemory::new(comm, capacity)?;
                let sums = comm.mem_alloc::<f32>(rows * columns)?;
                let dev = comm.create_dev_comm(DevCommRequirements::new())?;
                for sent in [32, 16, 32] {
                    stream.fill(&sums, f32::NAN)?;
                    let launch = kernels::peer_reg_tiles_sum::<$ranks>::args(
                        &dev, &sums, &memory, TILES, sent,
                    );
                    let config = LaunchConfig::new(1, 32 * WARPS);
                    // SAFETY: the sums and the slots have room for all tiles; all ranks launch it.
                    unsafe { launch.config(config).launch(&stream)? };
                    stream.synchronize()?;
                    let mut got = vec![0.0; rows * columns];
                    sums.copy_to_host(&mut got)?;
                    for (i, got) in got.into_iter().enumerate() {
                        let (row, column) = (i / columns, i % columns);
                        let own = |rank: usize| (rank + row + 16 * column) as f32;
                        let rounded = |rank| bf16::from_f32(own(rank)).to_f32();
                        let right: f32 = (0..$ranks).map(rounded).sum();
                        if column < sent as usize {
                            assert_eq!(got, right, "{rank:?}, {sent} columns, element {i}");
                        } else {
                            assert!(got.is_nan(), "{rank:?}: element {i} is not sent");
                        }
                    }
                }
                rank.barrier()
            });
        }
    };
}

/// Rank 1 adds nothing, so that a deadline ends the kernel of rank 0. A warp without a tile waits
/// at a named barrier for the warp that waits for the peer.
#[test]
fn registers_whose_peer_is_absent_are_not_added_after_a_deadline() {
    let gpus = Gpus::from(Simulation::new(2)).with_kernels(&KERNELS);
    gpus.run("registers_whose_peer_is_absent_are_not_added_after_a_deadline", |rank| {
        rank.load(&KERNELS)?;
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let columns = TILE[1];
        let capacity = PeerRegTiles::<2>::slots(1, columns as usize).unwrap();
        let memory = LamportMemory::new(comm, capacity)?;
        let sums = comm.mem_alloc::<f32>((TILE[0] * columns) as usize)?;
        let dev = comm.create_dev_comm(DevCommRequirements::new())?;
        if rank.rank() == 0 {
            let launch = kernels::peer_reg_tiles_sum::<2>::args(&dev, &sums, &memory, 1, columns);
            // SAFETY: the sums and the slots have room for the tile.
            unsafe { launch.grid(1).block(32 * WARPS).launch(&stream)? };
            let ended = stream.synchronize_within(Duration::from_millis(30));
            let ended = ended.expect_err("rank 1 sends nothing");
            assert!(matches!(ended, Error::Launch(LaunchError::KernelAborted { .. })), "{ended}");
        }
        rank.barrier()
    });
}

test_of!(registers_of_two_ranks_are_added, 2);
test_of!(registers_of_four_ranks_are_added, 4);
test_of!(registers_of_eight_ranks_are_added, 8);
