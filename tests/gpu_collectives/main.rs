//! Tests of NCCL's collectives on GPUs: every element is compared with a result computed on the
//! host.

mod checked;
mod every;
mod operators;
mod refusals;
mod slices;
mod types;

use devcomm::{CollectiveConfig, Error, Rank, ReduceOp};
use devcomm_testing::machines::on_gpus;
use every::{Case, Collective, Runner, counts};
use types::{Domain, types};

/// Checks every type and count, out of place and in place, with a different root for each count.
fn all_cases(rank: &Rank, collective: Collective, op: ReduceOp) -> Result<(), Error> {
    let runner = Runner::new(rank)?;
    for element in types() {
        let values = runner.values(Domain::of(op, element.data_type));
        for (index, count) in counts(rank).into_iter().enumerate() {
            let root = index % rank.n_ranks();
            let case = Case { collective, element: &element, op, count, root, values: &values };
            runner.check(&case, false)?;
            if collective.works_in_place() {
                runner.check(&case, true)?;
            }
        }
    }
    Ok(())
}

/// Tests of each collective on two and on four GPUs.
macro_rules! collectives {
    ($($collective:ident: $two:ident, $four:ident;)*) => { $(
        #[test]
        fn $two() {
            sums(stringify!($two), 2, Collective::$collective);
        }

        #[test]
        fn $four() {
            sums(stringify!($four), 4, Collective::$collective);
        }
    )* };
}

fn sums(name: &str, gpus: usize, collective: Collective) {
    on_gpus(name, gpus, |rank| all_cases(rank, collective, ReduceOp::Sum));
}

collectives! {
    AllReduce: all_reduce_on_two_gpus, all_reduce_on_four_gpus;
    Reduce: reduce_on_two_gpus, reduce_on_four_gpus;
    ReduceScatter: reduce_scatter_on_two_gpus, reduce_scatter_on_four_gpus;
    Broadcast: broadcast_on_two_gpus, broadcast_on_four_gpus;
    AllGather: all_gather_on_two_gpus, all_gather_on_four_gpus;
    AllToAll: all_to_all_on_two_gpus, all_to_all_on_four_gpus;
    Gather: gather_on_two_gpus, gather_on_four_gpus;
    Scatter: scatter_on_two_gpus, scatter_on_four_gpus;
    SendRecv: send_and_recv_on_two_gpus, send_and_recv_on_four_gpus;
}

fn every_operator(rank: &Rank) -> Result<(), Error> {
    for op in [ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min, ReduceOp::Avg] {
        all_cases(rank, Collective::AllReduce, op)?;
    }
    Ok(())
}

#[test]
fn every_operator_on_two_gpus() {
    on_gpus("every_operator_on_two_gpus", 2, every_operator);
}

#[test]
fn every_operator_on_four_gpus() {
    on_gpus("every_operator_on_four_gpus", 4, every_operator);
}

/// The configurations are an empty one and one that sets `max_ctas`.
#[test]
fn every_collective_with_a_configuration() {
    on_gpus("every_collective_with_a_configuration", 2, |rank| {
        for config in [CollectiveConfig::new(), CollectiveConfig::new().max_ctas(4)] {
            let runner = Runner::new(rank)?.configured(config);
            for element in types() {
                let op = ReduceOp::Sum;
                let values = runner.values(Domain::of(op, element.data_type));
                for collective in Collective::CONFIGURABLE {
                    let (count, root) = (1000, 1);
                    let element = &element;
                    let case = Case { collective, element, op, count, root, values: &values };
                    runner.check(&case, false)?;
                }
            }
        }
        Ok(())
    });
}
