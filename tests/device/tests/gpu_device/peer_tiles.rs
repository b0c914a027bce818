//! Tests of `PeerTiles`.

use cuda_std::bf16;
use devcomm::device::{Everyone, RowOwners};
use devcomm::{DevCommRequirements, LamportMemory, LaunchConfig, Rank, Simulation};
use devcomm_device_tests::KERNELS;
use devcomm_device_tests::kernels::{
    self,
    peer_tiles::{SHARED, THREADS, Tiles},
};
use devcomm_testing::machines::Gpus;

/// Columns of two tiles; the last part of the second tile is cut off.
const N: usize = 264;

/// Returns the sum over the ranks of an element.
fn right(ranks: usize, row: usize, column: usize) -> bf16 {
    let rounded = |rank| bf16::from_f32((rank + row + 2 * column) as f32).to_f32();
    bf16::from_f32((0..ranks).map(rounded).sum())
}

/// Tests three successive sums of `rows` rows, as the banks of slots take turns: a rank gets all
/// rows, or its share if `scatters`.
macro_rules! test_of {
    ($name:ident, $owners:ident, $ranks:literal, $rows:literal, $slots:expr, $scatters:literal) => {
        #[test]
        fn $name() {
            let gpus = Gpus::from(Simulation::new($ranks)).with_kernels(&KERNELS);
            gpus.run_seeds(stringify!($name), 0..4, |rank: &Rank, _| {
                rank.load(&KERNELS)?;
                let (comm, stream) = (rank.communicator()?, rank.stream()?);
                let capacity: u32 = $slots.unwrap();
                let memory = LamportMemory::new(comm, capacity)?;
                let rows = if $scatters { $rows / $ranks } else { $rows };
                let (own, c) = (comm.mem_alloc::<bf16>($rows * N)?, comm.window::<bf16>(rows * N)?);
                let requirements = DevCommRequirements::new().lsa_barriers(1);
                let dev = comm.create_dev_comm(requirements)?;
                for launch in 0..3 {
                    stream.fill(&c, bf16::NAN)?;
                    let sum = kernels::peer_tiles_sum::<$owners, $ranks>::args(
                        &dev, &own, &c, &memory, $rows, N as u32,
                    );
                    let config = LaunchConfig::new(1, THREADS).with_dynamic_shared(SHARED);
                    // SAFETY: C and the slots have room for all tiles; all ranks launch the kernel.
                    unsafe { sum.config(config).launch(&stream)? };
                    stream.synchronize()?;
                    let mut got = vec![bf16::NAN; rows * N];
                    c.copy_to_host(&mut got)?;
                    let first = if $scatters { rank.rank() * rows } else { 0 };
                    for (i, got) in got.into_iter().enumerate() {
                        let right = right($ranks, first + i / N, i % N);
                        assert_eq!(got, right, "{rank:?}, launch {launch}, element {i}");
                    }
                }
                rank.barrier()
            });
        }
    };
}

test_of!(parts_of_two_ranks_are_added, Everyone, 2, 37, Everyone::slots(37, N), false);
test_of!(parts_of_four_ranks_are_added, Everyone, 4, 37, Everyone::slots(37, N), false);
test_of!(parts_of_eight_ranks_are_added, Everyone, 8, 37, Everyone::slots(37, N), false);
test_of!(each_of_two_ranks_gets_its_rows, RowOwners, 2, 64, RowOwners::slots(32, N), true);
test_of!(each_of_four_ranks_gets_its_rows, RowOwners, 4, 64, RowOwners::slots(16, N), true);
test_of!(two_owners_send_their_sums_to_both, Tiles, 2, 37, Tiles::slots(37, N, 2), false);
test_of!(four_owners_send_their_sums_to_all, Tiles, 4, 37, Tiles::slots(37, N, 4), false);
