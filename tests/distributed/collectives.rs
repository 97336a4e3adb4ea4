//! Every collective, with ranks as threads.

use tch::{Device, Kind, Tensor};
use tch_extension::distributed::{ReduceOp, run_ranks};

#[test]
fn a_first_slice() {
    for n in 1..=4_i64 {
        run_ranks(n as usize, |group| {
            let rank = group.rank() as i64;
            let x = Tensor::full([2, 3], rank as f64 + 1.0, (Kind::Float, Device::Cpu));
            group.all_reduce(&x, ReduceOp::Sum)?;
            assert_eq!(f64::try_from(x.max())?, (n * (n + 1) / 2) as f64);
            let strided = Tensor::ones([3, 4], (Kind::Float, Device::Cpu));
            let view = strided.slice(1, 0, 4, 2);
            group.all_reduce(&view, ReduceOp::Sum)?;
            assert_eq!(f64::try_from(strided.sum(Kind::Double))?, (6 + 6 * n) as f64);
            let y = Tensor::from(rank);
            group.broadcast(&y, n as usize - 1)?;
            assert_eq!(i64::try_from(&y)?, n - 1);
            let all = Tensor::zeros([n * 2], (Kind::Int64, Device::Cpu));
            group.all_gather_into(&all, &Tensor::from_slice(&[rank, rank + 10]))?;
            assert_eq!(i64::try_from(all.sum(Kind::Int64))?, n * (n - 1) + 10 * n);
            let part = Tensor::zeros([2], (Kind::Double, Device::Cpu));
            let whole = Tensor::arange(2 * n, (Kind::Double, Device::Cpu));
            group.reduce_scatter_into(&part, &whole, ReduceOp::Sum)?;
            assert_eq!(part.double_value(&[1]), (n * (2 * rank + 1)) as f64);
            group.barrier()
        })
        .expect("all ranks");
    }
}
