//! Tests of measurements that find the fastest plan.

use devcomm_host::{World, WorldError};

use super::*;
use crate::{GemmAllReduce, GemmAllReducePlan, GemmReduceScatter};

#[test]
fn the_first_product_of_a_shape_is_measured_if_the_process_asks_for_that() {
    let run = |rank: &devcomm_host::Rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (a, b) = (comm.mem_alloc::<bf16>(6 * 16)?, comm.mem_alloc::<bf16>(8 * 16)?);
        let c = comm.mem_alloc::<bf16>(3 * 8)?;
        [&a, &b].into_iter().try_for_each(|factor| stream.fill(factor, bf16::ONE))?;
        let mut product = GemmReduceScatter::new(comm, &stream, 6, 8)?;
        product.launch(&a, &b, &c, [6, 8, 16])?;
        assert_ne!(product.explain([6, 8, 16])?.reason, "as it was measured");
        product.base.measures_first = true;
        for _ in 0..2 {
            product.launch(&a, &b, &c, [6, 8, 16])?;
        }
        let reason = |shape| product.explain(shape).map(|how| how.reason);
        assert_eq!(reason([6, 8, 16])?, "as it was measured");
        assert_ne!(reason([6, 8, 8])?, "as it was measured");
        let mut got = [bf16::ZERO; 24];
        stream.copy_to_host(&c.device_slice(), &mut got)?;
        assert_eq!(got, [bf16::from_f32(32.0); 24]);
        Ok::<_, devcomm_host::Error>(())
    };
    World::simulated(2).unwrap().run(run).unwrap();
}

#[test]
fn whether_the_first_product_is_measured_is_compared_between_the_ranks() {
    let run = |rank: &devcomm_host::Rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        crate::fused::MEASURES_FIRST.set(rank.is_root());
        let made = GemmReduceScatter::new(comm, &stream, 6, 8).map(drop);
        let Err(Error::World(WorldError::OptionsDiffer { option, first, second, .. })) = made
        else {
            panic!("{made:?}");
        };
        assert_eq!(option, "DEVCOMM_MEASURE_FIRST");
        assert_eq!((first, second), ((0, "true".to_owned()), (1, "false".to_owned())));
        Ok::<_, devcomm_host::Error>(())
    };
    World::simulated(2).unwrap().run(run).unwrap();
}

#[test]
fn plans_that_were_kept_are_prepared_for_shapes_that_fit() {
    let run = |rank: &devcomm_host::Rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let product = GemmAllReduce::new(comm, &stream, 64, 64)?;
        let shapes = [[64, 64, 8], [128, 64, 8]];
        let reason = |shape| product.explain(shape).map(|how| how.reason);
        for (shape, plan) in shapes.into_iter().zip(["strips", "wide"]) {
            let plan: GemmAllReducePlan = plan.parse().unwrap();
            product.base.decisions.tuned.insert(Extents::new(shape)?, plan);
        }
        assert_ne!(reason(shapes[0])?, "as this machine measured");
        product.set_plan(None)?;
        product.prepare_kept()?;
        assert_eq!(reason(shapes[0])?, "as this machine measured");
        assert_ne!(reason(shapes[1])?, "as this machine measured");
        Ok::<_, devcomm_host::Error>(())
    };
    World::simulated(2).unwrap().run(run).unwrap();
}
