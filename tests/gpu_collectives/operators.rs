//! Tests of premul-sum operators: the sum of every rank's elements times that rank's factor.

use devcomm::{Element, Error, Rank, ReduceOp, StateError, Stream};
use half::{bf16, f16};

use devcomm_testing::machines::on_gpus;
use devcomm_testing::works::require_works;

const COUNT: usize = 1001;

/// An element type that holds small integers.
trait Whole: Element + PartialEq + std::fmt::Debug {
    fn whole(value: i32) -> Self;
}

macro_rules! whole {
    ($($type:ty: $convert:expr;)*) => { $(
        impl Whole for $type {
            fn whole(value: i32) -> Self {
                $convert(value)
            }
        }
    )* };
}
whole! {
    i32: |x| x;
    u64: |x: i32| u64::from(x.unsigned_abs());
    f16: |x| f16::from_f32(x as f32);
    bf16: |x| bf16::from_f32(x as f32);
    f32: |x| x as f32;
    f64: f64::from;
}

/// Returns the element `i` of rank `rank`.
fn value(rank: usize, i: usize) -> i32 {
    ((rank + i) % 5) as i32
}

fn factor(rank: usize) -> i32 {
    rank as i32 + 1
}

/// Checks a factor from the host, and one in device memory, which may change between operations.
fn multiplies_and_sums<T: Whole>(rank: &Rank, stream: &Stream) -> Result<(), Error> {
    let (comm, me) = (rank.communicator()?, rank.rank());
    let (send, recv) = (comm.mem_alloc::<T>(COUNT)?, comm.mem_alloc::<T>(COUNT)?);
    send.copy_from_host(&(0..COUNT).map(|i| T::whole(value(me, i))).collect::<Vec<_>>())?;
    let require = |factors: fn(usize) -> i32| {
        let sum = |i| (0..rank.n_ranks()).map(|rank| factors(rank) * value(rank, i)).sum();
        let expected: Vec<T> = (0..COUNT).map(|i| T::whole(sum(i))).collect();
        let mut got = vec![T::whole(0); COUNT];
        recv.copy_to_host(&mut got)?;
        assert_eq!(got, expected, "{}", T::NAME);
        recv.fill_bytes(0xff)
    };

    let from_host = comm.pre_mul_sum(T::whole(factor(me)))?;
    comm.all_reduce(&send, &recv, &from_host, stream)?;
    stream.synchronize()?;
    require(factor)?;

    let scalar = comm.mem_alloc::<T>(1)?;
    scalar.copy_from_host(&[T::whole(factor(me))])?;
    let from_device = comm.pre_mul_sum_from(&scalar)?;
    comm.all_reduce(&send, &recv, &from_device, stream)?;
    stream.synchronize()?;
    require(factor)?;
    scalar.copy_from_host(&[T::whole(2)])?;
    comm.all_reduce(&send, &recv, &from_device, stream)?;
    stream.synchronize()?;
    require(|_| 2)
}

fn custom_operators(rank: &Rank) -> Result<(), Error> {
    let stream = rank.stream()?;
    multiplies_and_sums::<i32>(rank, &stream)?;
    multiplies_and_sums::<u64>(rank, &stream)?;
    multiplies_and_sums::<f16>(rank, &stream)?;
    multiplies_and_sums::<bf16>(rank, &stream)?;
    multiplies_and_sums::<f32>(rank, &stream)?;
    multiplies_and_sums::<f64>(rank, &stream)
}

#[test]
fn custom_operators_on_two_gpus() {
    on_gpus("custom_operators_on_two_gpus", 2, custom_operators);
}

#[test]
fn custom_operators_on_four_gpus() {
    on_gpus("custom_operators_on_four_gpus", 4, custom_operators);
}

#[test]
fn an_operator_is_for_one_type_and_one_communicator_until_it_is_closed() {
    let name = "an_operator_is_for_one_type_and_one_communicator_until_it_is_closed";
    on_gpus(name, 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let other = rank.new_communicator(&devcomm::CommConfig::new())?;
        let (floats, ints) = (comm.mem_alloc::<f32>(8)?, comm.mem_alloc::<i32>(8)?);
        let op = comm.pre_mul_sum(2.0f32)?;
        let dynamic = devcomm::Buffer::device_slice(&ints).into_dynamic();
        let refused = comm.all_reduce(&dynamic, &dynamic, &op, &stream);
        assert!(matches!(refused, Err(Error::InvalidInput { .. })), "{refused:?}");
        let refused = other.all_reduce(&floats, &floats, &op, &stream);
        assert!(matches!(refused, Err(Error::InvalidInput { .. })), "{refused:?}");
        // A factor is one element.
        let refused = comm.pre_mul_sum_from(&floats);
        assert!(matches!(refused, Err(Error::InvalidInput { .. })), "{refused:?}");

        comm.all_reduce(&floats, &floats, &op, &stream)?;
        assert!(op.is_valid());
        op.close()?;
        op.close()?;
        assert!(!op.is_valid());
        let refused = comm.all_reduce(&floats, &floats, &op, &stream);
        assert!(matches!(refused, Err(Error::State(StateError::Closed { .. }))), "{refused:?}");
        comm.all_reduce(&floats, &floats, ReduceOp::Sum, &stream)?;
        stream.synchronize()?;
        require_works(comm, &stream)?;
        require_works(&other, &stream)
    });
}
