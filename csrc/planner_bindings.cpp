// Python's view of the planner core: zbkern._planner. Lists in, lists out; the search runs without the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <tuple>

#include "planner.h"
#include "planner_batch.h"

namespace py = pybind11;
using namespace zbkern;

namespace {

Problem problem_from(const py::object& source) {
  Problem p;
  p.ranks = source.attr("ranks").cast<int>();
  p.chunks = source.attr("chunks").cast<int>();
  p.units = source.attr("units").cast<int>();
  p.placement = source.attr("placement").cast<std::vector<int>>();
  const int n = p.slices = static_cast<int>(source.attr("slices").cast<std::vector<int>>().size()), m = p.units;
  const auto by_chunk = source.attr("by_chunk").cast<std::vector<py::object>>();
  // From one entry per place in a microbatch to one per pass.
  const auto each = [&](const char* name) {
    std::vector<Time> found;
    for (const py::object& chunk : by_chunk) {
      const auto given = chunk.attr(name).cast<std::vector<Time>>();
      for (int k = 0; k < m; k++) found.push_back(given[k % n]);
    }
    return found;
  };
  p.forward = each("forward"), p.backward = each("backward"), p.weight = each("weight"), p.fused = each("fused");
  p.activation = each("activation"), p.freed = each("freed"), p.held = each("held"),
  p.merge_saving = each("merge_saving");
  for (int k = 0; k < m; k++) p.ends.push_back((k / n + 1) * n);
  if (source.attr("has_network").cast<bool>()) {
    p.network[kForward] = each("network_forward"), p.network[kBackward] = each("network_backward");
    p.collectives = each("collectives");
  }
  p.apart = source.attr("apart").cast<bool>();
  const std::vector<Time> lags = each("communication");
  p.forward_lag.assign(static_cast<std::size_t>(p.chunks) * m, 0), p.backward_lag = p.forward_lag;
  for (int c = 0; c + 1 < p.chunks; c++)
    for (int k = 0; k < m; k++) {
      p.forward_lag[(c + 1) * m + k] = lags[c * m + k];
      p.backward_lag[c * m + k] = lags[c * m + n - 1 - k % n];
    }
  const std::vector<Time> messages = each("message");
  if (std::any_of(messages.begin(), messages.end(), [](Time each) { return each > 0; })) {
    p.forward_message.assign(static_cast<std::size_t>(p.chunks) * m, 0), p.backward_message = p.forward_message;
    for (int c = 0; c + 1 < p.chunks; c++)
      for (int k = 0; k < m; k++) {
        p.forward_message[(c + 1) * m + k] = messages[c * m + k];
        p.backward_message[c * m + k] = messages[c * m + n - 1 - k % n];
      }
    p.room = source.attr("room").cast<std::vector<Time>>();
  }
  p.limit = source.attr("limit").cast<std::vector<Time>>();
  p.makespan = source.attr("makespan").cast<bool>();
  return p;
}

py::tuple tuple_from(const Ordering& orders) {
  return py::make_tuple(orders.cost, orders.rows, std::vector<int>(orders.fused.begin(), orders.fused.end()),
                        orders.beside);
}

Ordering ordering_from(const Rows& rows, const std::vector<int>& fused) {
  return {rows, std::vector<char>(fused.begin(), fused.end()), 0};
}

// When the actions of every row begin, and when they end, in the unit of the costs.
std::vector<std::pair<std::vector<double>, std::vector<double>>> times_from(const Measured& found,
                                                                           const py::object& source) {
  const double scale = source.attr("time_scale").cast<double>();
  std::vector<std::pair<std::vector<double>, std::vector<double>>> times(found.times.size());
  for (std::size_t rank = 0; rank < times.size(); rank++)
    for (const auto& [begin, end] : found.times[rank])
      times[rank].first.push_back(begin / scale), times[rank].second.push_back(end / scale);
  return times;
}

Growth growth_from(const py::object& source, const char* name) {
  const py::object growth = source.attr(name);
  const auto each = [&](const char* part) { return growth.attr(part).cast<std::vector<double>>(); };
  return {each("fixed"), each("linear"), each("quadratic")};
}

BatchCosts batch_costs_from(const py::object& source) {
  BatchCosts costs;
  costs.placement = source.attr("placement").cast<std::vector<int>>();
  costs.forward = growth_from(source, "forward"), costs.backward = growth_from(source, "backward"),
  costs.weight = growth_from(source, "weight"), costs.fused = growth_from(source, "fused");
  costs.communication = growth_from(source, "communication"), costs.activation = growth_from(source, "activation"),
  costs.held = growth_from(source, "held"), costs.carried = growth_from(source, "carried");
  costs.carried_gradients = growth_from(source, "carried_gradients");
  costs.network[kForward] = growth_from(source, "network_forward");
  costs.network[kBackward] = growth_from(source, "network_backward");
  costs.collectives = source.attr("collectives").cast<std::vector<Time>>();
  costs.masked[kForward] = source.attr("masked_forward").cast<std::vector<double>>();
  costs.masked[kBackward] = source.attr("masked_backward").cast<std::vector<double>>();
  costs.apart = source.attr("apart").cast<bool>();
  costs.merge_saving = source.attr("merge_saving").cast<std::vector<double>>();
  costs.limit = source.attr("limit").cast<std::vector<Time>>();
  costs.multiple = source.attr("multiple").cast<int>();
  costs.packs = source.attr("packs").cast<bool>();
  return costs;
}

// The result of a search, during which other threads may run.
template <typename Search>
auto without_gil(Search search) {
  py::gil_scoped_release release;
  return search();
}

// As in list_scheduler.py and native.py.
using Ints = std::vector<int>;
using RuleTuple = std::tuple<Ints, Ints, Ints, Ints, Ints, Ints, bool, bool, int, int, bool>;
using EffortTuple = std::tuple<std::uint64_t, std::vector<Time>, std::int64_t, Time, Time>;
using Times = std::vector<Time>;
using OrderTuple = std::tuple<Rows, Ints, std::vector<std::vector<std::pair<int, int>>>>;
using PartitionTuple = std::tuple<Ints, Times, Times, Times, Ints, Times, Times, double, std::vector<double>>;

template <typename Struct, typename Tuple>
Struct made_of(const Tuple& tuple) {
  return std::apply([](const auto&... parts) { return Struct{parts...}; }, tuple);
}

}  // namespace

PYBIND11_MODULE(_planner, module) {
  module.doc() = "The search core of zbkern.planning.planner, compiled.";
  module.attr("version") = 22;  // as in native.py: one more whenever it reads a problem differently
  module.def("best_rules",
             [](const py::object& source, const std::vector<RuleTuple>& tuples, int kept) {
               const Problem problem = problem_from(source);
               std::vector<Rule> rules;
               for (const auto& each : tuples) rules.push_back(made_of<Rule>(each));
               return without_gil([&] { return best_rules(problem, rules, kept); });
             });
  module.def("refine", [](const py::object& source, const RuleTuple& rule, bool may_follow, const EffortTuple& effort) {
    const Problem problem = problem_from(source);
    const auto found =
        without_gil([&] { return refine(problem, made_of<Rule>(rule), may_follow, made_of<Effort>(effort)); });
    return py::make_tuple(tuple_from(found.first), RuleTuple(found.second.parts()));
  });
  module.def("measure", [](const py::object& source, const Rows& rows, const std::vector<int>& fused) {
    const Measured found = measure(problem_from(source), ordering_from(rows, fused));
    return py::make_tuple(found.cost, found.peaks, found.messages);
  });
  module.def("timed", [](const py::object& source, const Rows& rows, const std::vector<int>& fused) {
    return times_from(measure(problem_from(source), ordering_from(rows, fused)), source);
  });
  module.def("in_turns", [](const std::vector<std::tuple<Time, Time, int>>& passes, Time start) {
    std::vector<Turn> turns;
    for (const auto& [compute, network, collectives] : passes) turns.push_back({compute, network, collectives});
    in_turns(turns, start);
    std::vector<Time> ends;
    for (const Turn& each : turns) ends.push_back(each.end);
    return ends;
  });
  module.def("grouped",
             [](const Rows& rows, const std::vector<int>& fused) { return grouped(ordering_from(rows, fused)); });
  module.def("search_blocks", [](const py::object& source, bool fuse, const EffortTuple& effort) {
    const Problem problem = problem_from(source);
    return tuple_from(without_gil([&] { return search_blocks(problem, fuse, made_of<Effort>(effort)); }));
  });
  module.def("search_patterns", [](const py::object& source, const Pattern& start, const EffortTuple& effort) {
    const Problem problem = problem_from(source);
    const auto found = without_gil([&] { return search_patterns(problem, start, made_of<Effort>(effort)); });
    return py::make_tuple(tuple_from(found.first), found.second);
  });
  module.def("plan_batch", [](const py::object& source, const std::vector<int>& lengths, std::int64_t passes,
                              const std::vector<OrderTuple>& published) {
    const BatchCosts costs = batch_costs_from(source);
    std::vector<Ordering> known;
    for (const auto& [rows, fused, beside] : published)
      known.push_back(ordering_from(rows, fused)), known.back().beside = beside;
    const BatchOrder found = without_gil([&] { return plan_batch(costs, lengths, passes, known); });
    py::object times = py::none(), peaks = py::none();
    if (!found.orders.rows.empty()) {
      const Measured played = measure(found.problem, found.orders);
      times = py::cast(times_from(played, source)), peaks = py::cast(played.peaks);
    }
    return py::make_tuple(found.rows.members, found.rows.cuts, found.orders.rows,
                          std::vector<int>(found.orders.fused.begin(), found.orders.fused.end()), found.orders.beside,
                          times, peaks, found.published, found.published_cost, found.excess);
  });
  module.def("anneal_partition", [](const PartitionTuple& problem, const Ints& start, const EffortTuple& effort) {
    return without_gil(
        [&] { return anneal_partition(made_of<PartitionProblem>(problem), start, made_of<Effort>(effort)); });
  });
  module.def("anneal", [](const std::vector<py::object>& sources, const Rows& rows, const std::vector<int>& fused,
                          const EffortTuple& effort, bool may_fuse) {
    std::vector<Problem> problems;
    for (const auto& each : sources) problems.push_back(problem_from(each));
    const Ordering start = ordering_from(rows, fused);
    return tuple_from(without_gil([&] { return anneal(problems, start, made_of<Effort>(effort), may_fuse); }));
  });
}
